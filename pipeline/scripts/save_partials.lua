-- What was generated so far of groups that are still being worked on, in case their holder never says more.
-- ARGS: [stream, ids, group ids]; payloads. Returns for each whether it was held; what was not is not saved.
local stream, ids, group_ids = STREAMS[ARGS[1]], ARGS[2], ARGS[3]
local held = held_among(stream, ids)
for i, id in ipairs(ids) do
  if held[i] then redis.call('HSET', PARTIALS, group_ids[i], ARGV[FIRST_PAYLOAD - 1 + i]) end
end
return cmsgpack.pack(held)
