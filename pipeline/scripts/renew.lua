-- Restarts the term of leases. ARGV: for each lease: stream index, id. Returns 1 (held) or 0 (lost) for each.
local result = {}
for i = 4, #ARGV, 2 do
  local stream, id = STREAMS[tonumber(ARGV[i])], ARGV[i + 1]
  local held = holds(stream, id)
  if held then redis.call('XCLAIM', stream, GROUP, CONSUMER, 0, id, 'JUSTID') end
  result[#result + 1] = held and 1 or 0
end
return result
