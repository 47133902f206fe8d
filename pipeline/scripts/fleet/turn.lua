-- Whose turn it is on a device that workers share. KEYS: device_turn, device_wish.
-- ARGV: worker id, milliseconds, 'take', 'keep' or 'give', this worker's wish: 'urgent' or 'idle'.
-- Returns '' where the worker does not have it, else 'held', or the wish of one who waits: 'urgent', or
-- 'idle' when it is to be given up once there is nothing to do. Who has died has it until it expires.
local holder = redis.call('GET', KEYS[1])
local wish = redis.call('GET', KEYS[2])
if ARGV[3] == 'give' then
  if holder == ARGV[1] then redis.call('DEL', KEYS[1]) end
  return ''
end
local others_first = ARGV[3] == 'take' and ARGV[4] == 'idle' and wish == 'urgent'
if holder ~= ARGV[1] and (holder or others_first) then
  if ARGV[3] == 'take' and (ARGV[4] == 'urgent' or wish ~= 'urgent') then
    redis.call('SET', KEYS[2], ARGV[4], 'PX', 1000)
  end
  return ''
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if ARGV[3] == 'take' and wish == ARGV[4] then
  redis.call('DEL', KEYS[2])
  return 'held'
end
return wish or 'held'
