-- Dead letters go back to the stream they died in. ARGV: max_length, then for each: letter id,
-- '1' if mended, payload. Returns 1 (moved), 0 (no such letter) or 2 (full) for each.
local before = replied()
if before then return before end

local max_length, result, by_name = tonumber(ARGV[4]), {}, {}
for _, stream in ipairs(STREAMS) do by_name[name_of(stream)] = stream end
for i = 5, #ARGV, 3 do
  local letter = ARGV[i]
  local _, named = fields_of(DEAD_LETTERS, letter)
  local stream = named and by_name[named.stream]
  local outcome = 1
  if not stream then
    outcome = 0
  elseif redis.call('XLEN', stream) >= max_length then
    outcome = 2
  else
    local payload = named.payload or ''
    if ARGV[i + 1] == '1' then payload = ARGV[i + 2] end
    local group_id, evaluation = named.group_id or '', named.evaluation or '0'
    add(stream, group_id, named.weight_version or '0', named.schema or '', evaluation, payload)
    redis.call('XDEL', DEAD_LETTERS, letter)
    if evaluation == '1' then
      redis.call('SADD', EVALUATING, group_id)
      count('eval_dead', -1)
    else
      count('dead', -1)
    end
  end
  result[#result + 1] = outcome
end
return reply(result)
