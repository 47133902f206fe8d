-- Gives back all that this consumer holds in one stream, seen by it or not, and then removes the
-- consumer. ARGV: stream index, most to release in this call. Returns [released, left].
local stream, most = STREAMS[tonumber(ARGV[4])], ARGV[5]
local pending = redis.pcall('XPENDING', stream, GROUP, '-', '+', most, CONSUMER)
if pending.err then return {0, 0} end
for _, entry in ipairs(pending) do
  local _, named = fields_of(stream, entry[1])
  local first = math.max(tonumber(named and named.attempt) or 1, 1)
  give_back(stream, entry[1], first + entry[4] - 1)
end
local left = #redis.call('XPENDING', stream, GROUP, '-', '+', 1, CONSUMER)
if left == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, CONSUMER) end
return {#pending, left}
