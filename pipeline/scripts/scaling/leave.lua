-- An `up` ends and answers no longer. KEYS: crew. ARGV: holder.
if redis.call('HGET', KEYS[1], 'holder') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
