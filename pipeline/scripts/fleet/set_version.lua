-- Raises the weight version of the run; it never falls. KEYS: meta. ARGV: version, trainer or ''.
-- Returns the run's version; an error where another trainer has taken the run over.
local last = redis.call('HGET', KEYS[1], 'last_trainer')
if ARGV[2] ~= '' and last and last ~= ARGV[2] then return redis.error_reply('FENCED by ' .. last) end
local known = redis.call('HGET', KEYS[1], 'weight_version')
if known and tonumber(known) >= tonumber(ARGV[1]) then return tonumber(known) end
redis.call('HSET', KEYS[1], 'weight_version', ARGV[1])
return tonumber(ARGV[1])
