-- Restarts the term of leases. ARGS: [stream, ids]. Returns for each whether it is held.
local stream, ids, ours = STREAMS[ARGS[1]], ARGS[2], {}
local held = held_among(stream, ids)
for i, id in ipairs(ids) do
  if held[i] then ours[#ours + 1] = id end
end
for first = 1, #ours, 500 do
  local some = {'XCLAIM', stream, GROUP, CONSUMER, 0, unpack(ours, first, math.min(first + 499, #ours))}
  some[#some + 1] = 'JUSTID'
  redis.call(unpack(some))
end
return cmsgpack.pack(held)
