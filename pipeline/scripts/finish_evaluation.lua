-- Evaluation groups that were reported. ARGS: [stream, ids, group ids].
-- Returns for each whether it was held.
local before = answered()
if before then return before end

local stream, ids, group_ids = STREAMS[ARGS[1]], ARGS[2], ARGS[3]
local held, removed = held_among(stream, ids), {}
for i, id in ipairs(ids) do
  if held[i] then
    redis.call('SREM', EVALUATING, group_ids[i])
    removed[#removed + 1] = id
  end
end
forget_partials(stream, removed)
remove_all(stream, removed)
count('eval_done', #removed)
count('refused', #ids - #removed)
return answer(held)
