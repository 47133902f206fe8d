-- Takes over leases that lapsed; buries what was tried too often.
-- ARGS: [stream, lease ms, how many, cursor, max_attempts]. Returns [cursor, [[id, attempt, fields], ...]].
local stream, taken = STREAMS[ARGS[1]], {}
local lease_ms, wanted, cursor, max_attempts = ARGS[2], ARGS[3], ARGS[4], ARGS[5]

-- XAUTOCLAIM looks at ten entries for each one wanted; this looks at ten thousand in all.
for _ = 1, math.ceil(1000 / wanted) do
  local found = redis.call('XAUTOCLAIM', stream, GROUP, CONSUMER, lease_ms, cursor, 'COUNT', wanted - #taken)
  cursor = found[1]
  for _, entry in ipairs(found[2]) do
    local id, fields, first = entry[1], entry[2], 1
    for i = 1, #fields, 2 do
      if fields[i] == 'attempt' then first = first_attempt(fields[i + 1]) end
    end
    local attempt = first - 1 + redis.call('XPENDING', stream, GROUP, id, id, 1)[1][4]
    if attempt > max_attempts then
      bury(stream, id, attempt - 1, string.format('no worker finished it in %d attempts', attempt - 1))
    else
      taken[#taken + 1] = {id, attempt, fields}
    end
  end
  if cursor == '0-0' or #taken >= wanted then break end
end
return cmsgpack.pack({cursor, taken})
