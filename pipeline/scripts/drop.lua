-- Takes groups out and frees their places, which others may take.
-- ARGS: [stream, reason, schema, [[id, group id, is evaluation, false or [group id, version, payload]], ...]].
-- Returns how many were held.
local before = answered()
if before then return before end

local stream, reason, schema, items = STREAMS[ARGS[1]], unpack(ARGS, 2, 4)
local held, removed, dropped, fed = held_among(stream, items), {}, 0, 0
for i, item in ipairs(items) do
  if held[i] then
    local id, group_id, is_evaluation, substitute = unpack(item)
    removed[#removed + 1] = id
    if is_evaluation then
      redis.call('SREM', EVALUATING, group_id)
    else
      dropped = dropped + 1
    end
    if substitute then
      add(PROMPTS, substitute[1], substitute[2], schema, false, substitute[3])
      fed = fed + 1
    end
  end
end
remove_all(stream, removed)
count('dropped:' .. reason, dropped)
count('eval_done', #removed - dropped)
count('fed', fed)
count('refused', #items - #removed)
return answer(#removed)
