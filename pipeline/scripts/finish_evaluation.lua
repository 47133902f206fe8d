-- Evaluation groups that were reported. ARGV: for each: stream index, id, group id.
-- Returns 1 or 0 (lease lost) for each.
local before = replied()
if before then return before end

local refused, result = 0, {}
for i = 4, #ARGV, 3 do
  local stream, id = STREAMS[tonumber(ARGV[i])], ARGV[i + 1]
  local held = holds(stream, id)
  if held then
    remove(stream, id)
    leave_evaluation('1', ARGV[i + 2], 'eval_done')
  else
    refused = refused + 1
  end
  result[#result + 1] = held and 1 or 0
end
count('refused', refused)
return reply(result)
