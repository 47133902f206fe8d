-- One stage forward, only for entries that are still held.
-- ARGS: [from, to, max_length, schema, ids, group ids, versions, are evaluation]; payloads.
-- Returns REFUSED, MOVED or FULL for each.
local before = answered()
if before then return before end

local source, target = STREAMS[ARGS[1]], STREAMS[ARGS[2]]
local max_length, schema, ids, group_ids, versions, are_evaluation = unpack(ARGS, 3, 8)
local length, refused, moved, result = redis.call('XLEN', target), 0, {}, {}
local held = held_among(source, ids)
for i, id in ipairs(ids) do
  if not held[i] then
    result[i] = REFUSED
    refused = refused + 1
  elseif length >= max_length then
    result[i] = FULL
  else
    add(target, group_ids[i], versions[i], schema, are_evaluation[i], ARGV[FIRST_PAYLOAD - 1 + i])
    result[i] = MOVED
    moved[#moved + 1] = id
    length = length + 1
  end
end
forget_partials(source, moved)
remove_all(source, moved)
count('refused', refused)
return answer(result)
