-- Gives up the right to train, if the worker holds it; its weights are published no longer. KEYS: trainer_lock, meta. ARGV: worker id.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], 'last_trainer', '')
redis.call('HDEL', KEYS[2], 'endpoints')
return redis.call('DEL', KEYS[1])
