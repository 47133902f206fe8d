-- Asks the `up` of a run for other numbers of workers. KEYS: crew. ARGV: role, number, and the number that it
-- is to replace, or '' for any; and so on. Returns the numbers that were asked for before, in the same order;
-- nothing where no `up` answers.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local before = {}
for i = 1, #ARGV, 3 do
  local wanted, number, expected = 'wanted:' .. ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local asked = redis.call('HGET', KEYS[1], wanted) or '0'
  before[#before + 1] = asked
  if expected == '' or (expected == asked and number ~= asked) then
    redis.call('HSET', KEYS[1], wanted, number)
    redis.call('HINCRBY', KEYS[1], 'asked', 1)
  end
end
return before
