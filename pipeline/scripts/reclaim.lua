-- Takes over leases that lapsed; buries what was tried too often. ARGV: stream index, lease ms,
-- how many, cursor, max_attempts. Returns [cursor, [[id, deliveries, fields], ...], buried].
local index, lease_ms, wanted = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local cursor, max_attempts = ARGV[7], tonumber(ARGV[8])
local stream, taken, buried = STREAMS[index], {}, 0

for _ = 1, 100 do
  local found = redis.call('XAUTOCLAIM', stream, GROUP, CONSUMER, lease_ms, cursor, 'COUNT', wanted - #taken)
  cursor = found[1]
  for _, entry in ipairs(found[2]) do
    local id = entry[1]
    local pending = redis.call('XPENDING', stream, GROUP, id, id, 1)
    local deliveries, first = pending[1][4], 1
    for i = 1, #entry[2], 2 do
      if entry[2][i] == 'attempt' then first = math.max(tonumber(entry[2][i + 1]) or 1, 1) end
    end
    local attempt = first + deliveries - 1
    if attempt > max_attempts then
      bury(index, id, attempt - 1, string.format('no worker finished it in %d attempts', attempt - 1))
      buried = buried + 1
    else
      taken[#taken + 1] = {id, deliveries, entry[2]}
    end
  end
  if cursor == '0-0' or #taken >= wanted then break end
end
return {cursor, taken, buried}
