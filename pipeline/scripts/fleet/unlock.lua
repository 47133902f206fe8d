-- Gives up the right to train, if the worker holds it. KEYS: trainer_lock. ARGV: worker id.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
