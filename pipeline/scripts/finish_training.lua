-- The groups of one optimiser step: gone from the stream, kept as uncommitted.
-- ARGS: [stream, ids, group ids]; payloads of their prompts. Returns for each whether it was held.
local before = answered()
if before then return before end

local stream, ids, group_ids = STREAMS[ARGS[1]], ARGS[2], ARGS[3]
local held, removed = held_among(stream, ids), {}
for i, id in ipairs(ids) do
  if held[i] then
    redis.call('HSET', UNCOMMITTED, group_ids[i], ARGV[FIRST_PAYLOAD - 1 + i])
    removed[#removed + 1] = id
  end
end
forget_partials(stream, removed)
remove_all(stream, removed)
count('trained', #removed)
count('refused', #ids - #removed)
return answer(held)
