-- Dead letters go back to the stream they died in.
-- ARGS: [max_length, letter ids, are mended]; payloads, read where mended. Returns how many moved.
local before = answered()
if before then return before end

local max_length, letter_ids, are_mended, moved, by_name = ARGS[1], ARGS[2], ARGS[3], 0, {}
for _, stream in ipairs(STREAMS) do by_name[name_of(stream)] = stream end
for i, letter_id in ipairs(letter_ids) do
  local _, named = fields_of(DEAD_LETTERS, letter_id)
  local stream = named and by_name[named.stream]
  local group_id, is_evaluation = named and named.group_id or '', named and named.evaluation == '1'
  -- An evaluation group may have been fed anew meanwhile; it is live once.
  local is_replaced = is_evaluation and redis.call('SISMEMBER', EVALUATING, group_id) == 1
  if stream and not is_replaced and redis.call('XLEN', stream) < max_length then
    local payload = are_mended[i] and ARGV[FIRST_PAYLOAD - 1 + i] or named.payload or ''
    add(stream, group_id, named.weight_version or 0, named.schema or 0, is_evaluation, payload)
    redis.call('XDEL', DEAD_LETTERS, letter_id)
    if is_evaluation then
      redis.call('SADD', EVALUATING, group_id)
      count('eval_dead', -1)
    else
      count('dead', -1)
    end
    moved = moved + 1
  end
end
return answer(moved)
