-- Sets one entry aside. ARGS: [stream, id, attempt, reason]. Returns whether it was held.
local before = answered()
if before then return before end

local stream, id, attempt, reason = STREAMS[ARGS[1]], unpack(ARGS, 2, 4)
local held = held_among(stream, {id})[1]
if held then bury(stream, id, attempt, reason) else count('refused', 1) end
return answer(held)
