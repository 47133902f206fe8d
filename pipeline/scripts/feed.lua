-- Admission. ARGS: [limit, max_length, schema, group ids, versions, are evaluation, ordinals or -1]; payloads.
-- Accepts from the front, and returns how many.
local before = answered()
if before then return before end

local limit, max_length, schema, group_ids, versions, are_evaluation, ordinals = unpack(ARGS)
local num_live, length = live(), redis.call('XLEN', PROMPTS)
local next_ordinal = tonumber(redis.call('HGET', LEDGER, 'next_ordinal') or 0)
local accepted, fed, eval_fed = 0, 0, 0

for i, group_id in ipairs(group_ids) do
  local is_evaluation, ordinal = are_evaluation[i], ordinals[i]
  local is_known = ordinal >= 0 and ordinal < next_ordinal
  if is_evaluation then is_known = redis.call('SISMEMBER', EVALUATING, group_id) == 1 end
  if not is_known then
    if length >= max_length or (not is_evaluation and num_live >= limit) then break end
    add(PROMPTS, group_id, versions[i], schema, is_evaluation, ARGV[FIRST_PAYLOAD - 1 + i])
    length = length + 1
    if is_evaluation then
      redis.call('SADD', EVALUATING, group_id)
      eval_fed = eval_fed + 1
    else
      num_live, fed = num_live + 1, fed + 1
      next_ordinal = math.max(next_ordinal, ordinal + 1)
    end
  end
  accepted = accepted + 1
end

count('fed', fed)
count('eval_fed', eval_fed)
if next_ordinal > 0 then redis.call('HSET', LEDGER, 'next_ordinal', next_ordinal) end
return answer(accepted)
