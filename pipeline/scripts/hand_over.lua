-- One stage forward, only for entries that are still held.
-- ARGS: [from, to, max_length, schema, [[id, group id, version, is evaluation, payload], ...]].
-- Returns REFUSED, MOVED or FULL for each.
local before = answered()
if before then return before end

local source, target, max_length, schema, items = STREAMS[ARGS[1]], STREAMS[ARGS[2]], unpack(ARGS, 3, 5)
local length, refused, moved, result = redis.call('XLEN', target), 0, {}, {}
local held = held_among(source, items)
for i, item in ipairs(items) do
  if not held[i] then
    result[i] = REFUSED
    refused = refused + 1
  elseif length >= max_length then
    result[i] = FULL
  else
    add(target, item[2], item[3], schema, item[4], item[5])
    result[i] = MOVED
    moved[#moved + 1] = item[1]
    length = length + 1
  end
end
remove_all(source, moved)
count('refused', refused)
return answer(result)
