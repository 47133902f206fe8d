-- A worker's sign of life, and in the same breath what it is asked to do.
-- KEYS: workers, control, meta. ARGV: worker id, start in server microseconds ('' at the first beat), JSON,
-- field of meta that says why the one before it of its role has failed, or ''.
-- Returns: start, paused, stop reason, drain, weight version, run id.
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local started = ARGV[2]
if started == '' then
  started = now
  if ARGV[4] ~= '' then redis.call('HDEL', KEYS[3], ARGV[4]) end
end
redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. started .. ' ' .. ARGV[3])
local asked = redis.call('HMGET', KEYS[2], 'paused', 'stop', 'stop_reason', 'drain:' .. ARGV[1])
local known = redis.call('HMGET', KEYS[3], 'weight_version', 'run_id')
-- A stop ends the workers that were there when it was said; one that starts later belongs to what comes next.
local stop_reason = false
if asked[2] and tonumber(asked[2]) >= tonumber(started) then stop_reason = asked[3] end
return {started, asked[1], stop_reason, asked[4], known[1], known[2]}
