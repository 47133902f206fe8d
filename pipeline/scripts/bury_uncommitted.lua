-- Groups that would have to be fed again and cannot be: their prompts are not to be read.
-- ARGS: [schema, group ids, reasons]. Returns how many were uncommitted.
local before = answered()
if before then return before end

local schema, group_ids, reasons = unpack(ARGS)
local moved = 0
for i, group_id in ipairs(group_ids) do
  local payload = redis.call('HGET', UNCOMMITTED, group_id)
  if payload then
    redis.call('XADD', DEAD_LETTERS, '*', 'stream', name_of(PROMPTS), 'reason', reasons[i], 'attempt', '1',
      'dead_at', NOW, 'group_id', group_id, 'weight_version', '0', 'created_at', NOW, 'schema', schema,
      'payload', payload)
    redis.call('HDEL', UNCOMMITTED, group_id)
    moved = moved + 1
  end
end
count('trained', -moved)
count('dead', moved)
return answer(moved)
