-- Says where the weights are. KEYS: meta. ARGV: the addresses as text, trainer or ''.
-- An error where another trainer has taken the run over: generators follow that one.
local last = redis.call('HGET', KEYS[1], 'last_trainer')
if ARGV[2] ~= '' and last and last ~= ARGV[2] then return redis.error_reply('FENCED by ' .. last) end
redis.call('HSET', KEYS[1], 'endpoints', ARGV[1])
return 1
