-- Groups whose effect was lost with the weights go back to the prompts.
-- ARGS: [limit, max_length, schema, [[group id, version, payload], ...]]. Accepts from the front and returns
-- how many; a group that is not uncommitted (any more) counts as accepted and is left alone.
local before = answered()
if before then return before end

local limit, max_length, schema, entries = unpack(ARGS)
local num_live, length = live(), redis.call('XLEN', PROMPTS)
local accepted, moved = 0, 0
for _, entry in ipairs(entries) do
  local group_id, version, payload = unpack(entry)
  if redis.call('HEXISTS', UNCOMMITTED, group_id) == 1 then
    if num_live >= limit or length >= max_length then break end
    add(PROMPTS, group_id, version, schema, false, payload)
    redis.call('HDEL', UNCOMMITTED, group_id)
    num_live, length, moved = num_live + 1, length + 1, moved + 1
  end
  accepted = accepted + 1
end
count('trained', -moved)
return answer(accepted)
