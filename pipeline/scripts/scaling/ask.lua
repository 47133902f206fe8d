-- Asks the `up` of a run for other numbers of workers. KEYS: crew. ARGV: role, number, and so on.
-- Returns the numbers that were asked for before, in the same order; nothing where no `up` answers.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local before = {}
for i = 1, #ARGV, 2 do
  before[#before + 1] = redis.call('HGET', KEYS[1], 'wanted:' .. ARGV[i]) or '0'
  redis.call('HSET', KEYS[1], 'wanted:' .. ARGV[i], ARGV[i + 1])
end
return before
