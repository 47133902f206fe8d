-- The groups of one optimiser step: gone from the streams, kept as uncommitted. ARGV: for each:
-- stream index, id, group id, prompt payload. Returns 1 or 0 (lease lost) for each.
local before = replied()
if before then return before end

local trained, refused, result = 0, 0, {}
for i = 4, #ARGV, 4 do
  local stream, id = STREAMS[tonumber(ARGV[i])], ARGV[i + 1]
  local held = holds(stream, id)
  if held then
    remove(stream, id)
    redis.call('HSET', UNCOMMITTED, ARGV[i + 2], ARGV[i + 3])
    trained = trained + 1
  else
    refused = refused + 1
  end
  result[#result + 1] = held and 1 or 0
end
count('trained', trained)
count('refused', refused)
return reply(result)
