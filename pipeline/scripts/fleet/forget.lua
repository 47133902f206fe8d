-- Removes a worker that has shown no sign of life since it was last looked at.
-- KEYS: workers, control. ARGV: worker id, the last beat that was seen.
local value = redis.call('HGET', KEYS[1], ARGV[1])
if not value or string.match(value, '^%d+') ~= ARGV[2] then return 0 end
redis.call('HDEL', KEYS[2], 'drain:' .. ARGV[1])
return redis.call('HDEL', KEYS[1], ARGV[1])
