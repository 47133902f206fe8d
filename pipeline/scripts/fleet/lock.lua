-- Takes or renews the right to train. KEYS: trainer_lock, control. ARGV: worker id, milliseconds, 'take' or 'renew'.
-- Returns 1 when the worker holds it. Taking it begins a new stretch of the run: an old stop is over.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
if not holder and ARGV[3] == 'renew' then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if not holder then redis.call('HDEL', KEYS[2], 'stop', 'stop_reason') end
return 1
