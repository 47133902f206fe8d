-- Evaluation groups that were reported. ARGS: [stream, [[id, group id], ...]].
-- Returns for each whether it was held.
local before = answered()
if before then return before end

local stream, items = STREAMS[ARGS[1]], ARGS[2]
local held, removed = held_among(stream, items), {}
for i, item in ipairs(items) do
  if held[i] then
    redis.call('SREM', EVALUATING, item[2])
    removed[#removed + 1] = item[1]
  end
end
remove_all(stream, removed)
count('eval_done', #removed)
count('refused', #items - #removed)
return answer(held)
