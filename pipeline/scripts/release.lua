-- Gives entries back, with the attempt they were at. ARGS: [stream, ids, attempts].
-- Returns how many were held.
local before = answered()
if before then return before end

local stream, ids, attempts = STREAMS[ARGS[1]], ARGS[2], ARGS[3]
local held, released = held_among(stream, ids), 0
for i, id in ipairs(ids) do
  if held[i] then
    give_back(stream, id, attempts[i])
    released = released + 1
  end
end
return answer(released)
