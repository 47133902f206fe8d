-- Takes groups out and frees their place. ARGV: reason, schema, then for each: stream index, id,
-- group id, evaluation, and what is fed instead: group id or '', version, payload.
-- Returns 1 or 0 (lease lost) for each.
local before = replied()
if before then return before end

local reason, schema = ARGV[4], ARGV[5]
local dropped, fed, refused, result = 0, 0, 0, {}
for i = 6, #ARGV, 7 do
  local stream, id = STREAMS[tonumber(ARGV[i])], ARGV[i + 1]
  local held = holds(stream, id)
  if held then
    remove(stream, id)
    if not leave_evaluation(ARGV[i + 3], ARGV[i + 2], 'eval_done') then dropped = dropped + 1 end
    if ARGV[i + 4] ~= '' then
      add(PROMPTS, ARGV[i + 4], ARGV[i + 5], schema, '0', ARGV[i + 6])
      fed = fed + 1
    end
  else
    refused = refused + 1
  end
  result[#result + 1] = held and 1 or 0
end
count('dropped:' .. reason, dropped)
count('fed', fed)
count('refused', refused)
return reply(result)
