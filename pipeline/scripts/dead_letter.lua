-- Sets one entry aside. ARGS: [stream, [[id, attempt, reason]]]. Returns whether it was held.
local before = answered()
if before then return before end

local stream, items = STREAMS[ARGS[1]], ARGS[2]
local held = held_among(stream, items)[1]
if held then bury(stream, unpack(items[1])) else count('refused', 1) end
return answer(held)
