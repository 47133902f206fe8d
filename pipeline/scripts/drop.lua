-- Takes groups out and frees their places, which others may take.
-- ARGS: [stream, reason, schema, ids, evaluation, ids fed instead, their versions]; payloads of these.
-- evaluation: group id of each, or false where it is a training group; empty where all are.
-- The ids fed instead are as many as ids, or none. Returns how many were held.
local before = answered()
if before then return before end

local stream, reason, schema = STREAMS[ARGS[1]], ARGS[2], ARGS[3]
local ids, evaluation, substitutes, versions = unpack(ARGS, 4, 7)
local held, removed, dropped, fed = held_among(stream, ids), {}, 0, 0
for i, id in ipairs(ids) do
  if held[i] then
    removed[#removed + 1] = id
    if evaluation[i] then
      redis.call('SREM', EVALUATING, evaluation[i])
    else
      dropped = dropped + 1
    end
    if substitutes[i] then
      add(PROMPTS, substitutes[i], versions[i], schema, false, ARGV[FIRST_PAYLOAD - 1 + i])
      fed = fed + 1
    end
  end
end
forget_partials(stream, removed)
remove_all(stream, removed)
count('dropped:' .. reason, dropped)
count('eval_done', #removed - dropped)
count('fed', fed)
count('refused', #ids - #removed)
return answer(#removed)
