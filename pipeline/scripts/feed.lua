-- Admission. ARGV: limit, max_length, schema, then for each entry: group id, version, evaluation,
-- ordinal or '', payload. Accepts from the front and returns how many.
local before = replied()
if before then return before[1] end

local limit, max_length, schema = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local num_live, length = live(), redis.call('XLEN', PROMPTS)
local next_ordinal = tonumber(redis.call('HGET', LEDGER, 'next_ordinal') or 0)
local accepted, fed, eval_fed = 0, 0, 0

for i = 7, #ARGV, 5 do
  local group_id, version, evaluation, ordinal, payload = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local known
  if evaluation == '1' then
    known = redis.call('SISMEMBER', EVALUATING, group_id) == 1
  else
    known = ordinal ~= '' and tonumber(ordinal) < next_ordinal
  end
  if not known then
    if length >= max_length or (evaluation ~= '1' and num_live >= limit) then break end
    add(PROMPTS, group_id, version, schema, evaluation, payload)
    length = length + 1
    if evaluation == '1' then
      redis.call('SADD', EVALUATING, group_id)
      eval_fed = eval_fed + 1
    else
      num_live = num_live + 1
      fed = fed + 1
      if ordinal ~= '' then next_ordinal = tonumber(ordinal) + 1 end
    end
  end
  accepted = accepted + 1
end

count('fed', fed)
count('eval_fed', eval_fed)
if fed > 0 and next_ordinal > 0 then redis.call('HSET', LEDGER, 'next_ordinal', next_ordinal) end
return reply({accepted})[1]
