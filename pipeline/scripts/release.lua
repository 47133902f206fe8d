-- Gives entries back, with the attempt they were at.
-- ARGS: [stream, ids, attempts, have failed, group ids, are saved]; payloads, read where saved.
-- A payload is what was generated of the group so far; a failure forgets it, as it may have been the cause.
-- Returns how many were held.
local before = answered()
if before then return before end

local stream, ids, attempts, have_failed, group_ids, are_saved = STREAMS[ARGS[1]], unpack(ARGS, 2, 6)
local held, released = held_among(stream, ids), 0
for i, id in ipairs(ids) do
  if held[i] then
    if have_failed then forget_partials(stream, {id}) end
    if are_saved[i] then redis.call('HSET', PARTIALS, group_ids[i], ARGV[FIRST_PAYLOAD - 1 + i]) end
    give_back(stream, id, attempts[i])
    released = released + 1
  end
end
return answer(released)
