-- Groups whose effect was lost with the weights go back to the prompts.
-- ARGS: [limit, max_length, schema, group ids, versions]; payloads. Accepts from the front and returns
-- how many; a group that is not uncommitted (any more) counts as accepted and is left alone.
local before = answered()
if before then return before end

local limit, max_length, schema, group_ids, versions = unpack(ARGS)
local num_live, length = live(), redis.call('XLEN', PROMPTS)
local accepted, moved = 0, 0
for i, group_id in ipairs(group_ids) do
  if redis.call('HEXISTS', UNCOMMITTED, group_id) == 1 then
    if num_live >= limit or length >= max_length then break end
    add(PROMPTS, group_id, versions[i], schema, false, ARGV[FIRST_PAYLOAD - 1 + i])
    redis.call('HDEL', UNCOMMITTED, group_id)
    num_live, length, moved = num_live + 1, length + 1, moved + 1
  end
  accepted = accepted + 1
end
count('trained', -moved)
return answer(accepted)
