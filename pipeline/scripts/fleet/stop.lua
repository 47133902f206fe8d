-- Ends the run for all workers that are there now. KEYS: control. ARGV: reason.
local time = redis.call('TIME')
redis.call('HSET', KEYS[1], 'stop', string.format('%.0f', time[1] * 1000000 + time[2]), 'stop_reason', ARGV[1])
return 1
