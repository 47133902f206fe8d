-- One stage forward, only for entries that are still held. ARGV: to, max_length, schema, then for each group:
-- from, id, group id, version, evaluation, payload. Returns 1 (moved), 0 (refused) or 2 (full) for each.
local before = replied()
if before then return before end

local target, max_length, schema = STREAMS[tonumber(ARGV[4])], tonumber(ARGV[5]), ARGV[6]
local length, refused, result = redis.call('XLEN', target), 0, {}
for i = 7, #ARGV, 6 do
  local stream, id = STREAMS[tonumber(ARGV[i])], ARGV[i + 1]
  local outcome = 1
  if not holds(stream, id) then
    outcome = 0
    refused = refused + 1
  elseif length >= max_length then
    outcome = 2
  else
    add(target, ARGV[i + 2], ARGV[i + 3], schema, ARGV[i + 4], ARGV[i + 5])
    remove(stream, id)
    length = length + 1
  end
  result[#result + 1] = outcome
end
count('refused', refused)
return reply(result)
