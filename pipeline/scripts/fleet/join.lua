-- The first worker fixes what the run's workers agree on; the others must have the same.
-- KEYS: meta. ARGV: run id if there is none yet, resolved configuration, then key, value, ...
-- Returns: run id and, for every key that differs, the key and the run's value.
local answer = {redis.call('HGET', KEYS[1], 'run_id')}
for i = 3, #ARGV, 2 do
  local stored = redis.call('HGET', KEYS[1], 'agreed:' .. ARGV[i])
  if stored and stored ~= ARGV[i + 1] then
    answer[#answer + 1] = ARGV[i]
    answer[#answer + 1] = stored
  end
end
if #answer > 1 then return answer end
if not answer[1] then
  local time = redis.call('TIME')
  redis.call('HSET', KEYS[1], 'run_id', ARGV[1], 'config', ARGV[2], 'created_at', time[1])
  answer[1] = ARGV[1]
end
for i = 3, #ARGV, 2 do redis.call('HSETNX', KEYS[1], 'agreed:' .. ARGV[i], ARGV[i + 1]) end
return answer
