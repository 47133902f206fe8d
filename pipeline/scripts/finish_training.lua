-- The groups of one optimiser step: gone from the stream, kept as uncommitted.
-- ARGS: [stream, [[id, group id, prompt payload], ...]]. Returns for each whether it was held.
local before = answered()
if before then return before end

local stream, items = STREAMS[ARGS[1]], ARGS[2]
local held, removed = held_among(stream, items), {}
for i, item in ipairs(items) do
  if held[i] then
    redis.call('HSET', UNCOMMITTED, item[2], item[3])
    removed[#removed + 1] = item[1]
  end
end
remove_all(stream, removed)
count('trained', #removed)
count('refused', #items - #removed)
return answer(held)
