-- Restarts the term of leases. ARGS: [stream, [[id], ...]]. Returns for each whether it is held.
local stream, items = STREAMS[ARGS[1]], ARGS[2]
local held, ids = held_among(stream, items), {}
for i, item in ipairs(items) do
  if held[i] then ids[#ids + 1] = item[1] end
end
for first = 1, #ids, 500 do
  local some = {'XCLAIM', stream, GROUP, CONSUMER, 0, unpack(ids, first, math.min(first + 499, #ids))}
  some[#some + 1] = 'JUSTID'
  redis.call(unpack(some))
end
return cmsgpack.pack(held)
