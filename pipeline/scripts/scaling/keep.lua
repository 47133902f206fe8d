-- Says how many workers an `up` keeps and hears how many are asked for. KEYS: crew.
-- ARGV: holder, milliseconds until it counts as gone, then role, number before, number now, and so on.
-- Returns the numbers asked for, in the same order; nothing while another `up` answers for the run.
-- The number of now counts where nobody has asked for another since the one before.
local holder = redis.call('HGET', KEYS[1], 'holder')
if holder and holder ~= ARGV[1] then return {} end
redis.call('HSET', KEYS[1], 'holder', ARGV[1])
local wanted = {}
for i = 3, #ARGV, 3 do
  local role, before, now = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local asked = redis.call('HGET', KEYS[1], 'wanted:' .. role)
  if not asked or asked == before then
    asked = now
    redis.call('HSET', KEYS[1], 'wanted:' .. role, now)
  end
  redis.call('HSET', KEYS[1], 'kept:' .. role, now)
  wanted[#wanted + 1] = asked
end
redis.call('HSET', KEYS[1], 'heard', redis.call('HGET', KEYS[1], 'asked') or '0')
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return wanted
