-- Gives back what this consumer holds in one stream, seen by it or not; when nothing is left the
-- consumer is removed. ARGS: [stream, most to release in this call]. Returns [released, left].
local stream, most = STREAMS[ARGS[1]], ARGS[2]
local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', most, CONSUMER)
if pending.err then return cmsgpack.pack({0, 0}) end
for _, row in ipairs(pending) do
  local _, named = fields_of(stream, row[1])
  give_back(stream, row[1], first_attempt(named and named.attempt) + row[4] - 1)
end
local left = #redis.call('XPENDING', stream, GROUP, '-', '+', 1, CONSUMER)
if left == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, CONSUMER) end
return cmsgpack.pack({#pending, left})
