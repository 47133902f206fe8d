-- Takes or renews the right to train. KEYS: trainer_lock, control, meta. ARGV: worker id, milliseconds, 'take' or 'renew'.
-- Returns 1 when the worker holds it. One that expired is renewed only by its last holder: who was
-- replaced meanwhile must not come back. Taking it begins a new stretch of the run: an old stop is over.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
local last = redis.call('HGET', KEYS[3], 'last_trainer')
if ARGV[3] == 'renew' and last and last ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if last ~= ARGV[1] then
  redis.call('HSET', KEYS[3], 'last_trainer', ARGV[1])
  redis.call('HDEL', KEYS[2], 'stop', 'stop_reason')
end
return 1
