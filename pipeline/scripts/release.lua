-- Gives entries back, with the attempt they were at. ARGS: [stream, [[id, attempt], ...]].
-- Returns how many were held.
local before = answered()
if before then return before end

local stream, items = STREAMS[ARGS[1]], ARGS[2]
local held, released = held_among(stream, items), 0
for i, item in ipairs(items) do
  if held[i] then
    give_back(stream, item[1], item[2])
    released = released + 1
  end
end
return answer(released)
