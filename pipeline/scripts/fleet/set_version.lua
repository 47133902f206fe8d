-- Raises the weight version of the run; it never falls. KEYS: meta. ARGV: version. Returns the run's version.
local known = redis.call('HGET', KEYS[1], 'weight_version')
if known and tonumber(known) >= tonumber(ARGV[1]) then return tonumber(known) end
redis.call('HSET', KEYS[1], 'weight_version', ARGV[1])
return tonumber(ARGV[1])
