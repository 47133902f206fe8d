-- In front of every script. All of a run's keys come in KEYS, so that a cluster can route the call.
-- What a script needs besides comes as one msgpack value, columns rather than rows, and so does
-- its answer. Payloads follow as they are: to pass through Lua once costs them enough.
local STREAMS = {KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]}
local PROMPTS, DEAD_LETTERS, LEDGER = KEYS[1], KEYS[6], KEYS[7]
local UNCOMMITTED, EVALUATING, REPLIES, PARTIALS, META = KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local GROUP, CONSUMER, CALL, FENCE = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
local ARGS, FIRST_PAYLOAD = cmsgpack.unpack(ARGV[4]), 6

-- A trainer that stood still while another took its place is refused, whenever it wakes up. Where Redis
-- has lost the run nobody has taken it over.
if FENCE ~= '' then
  local last = redis.call('HGET', META, 'last_trainer')
  if last and last ~= FENCE then return redis.error_reply('FENCED by ' .. last) end
end

local clock = redis.call('TIME')
local NOW_MS = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOW = string.format('%d.%06d', clock[1], clock[2])
local REFUSED, MOVED, FULL = 0, 1, 2

-- A client whose connection breaks before the answer comes sends the call again. The call's number
-- tells: then the first answer is given once more, and nothing is done twice.
local function answered()
  local last = redis.call('HGET', REPLIES, CONSUMER)
  if last and string.sub(last, 1, #CALL + 1) == CALL .. ' ' then return string.sub(last, #CALL + 2) end
end

local function answer(result)
  local packed = cmsgpack.pack(result)
  redis.call('HSET', REPLIES, CONSUMER, CALL .. ' ' .. packed)
  return packed
end

local function count(counter, amount)
  if amount ~= 0 then redis.call('HINCRBY', LEDGER, counter, amount) end
end

-- Which of these entries this consumer holds: XACK does not ask, XPENDING does. One look at the
-- range from the first to the last serves the usual batch, which was claimed together; what is not
-- in it is looked up by itself. An id that is named twice counts once. No such stream: none is held.
local function held_among(stream, ids)
  local held, result = {}, {}
  if #ids > 1 then
    local rows = redis.pcall('XPENDING', stream, GROUP, ids[1], ids[#ids], 2 * #ids, CONSUMER)
    for _, row in ipairs(rows.err and {} or rows) do held[row[1]] = true end
  end
  for i, id in ipairs(ids) do
    if held[id] == nil then
      local rows = redis.pcall('XPENDING', stream, GROUP, id, id, 1, CONSUMER)
      held[id] = not rows.err and rows[1] ~= nil
    end
    result[i] = held[id]
    held[id] = false
  end
  return result
end

local function remove_all(stream, ids)
  for first = 1, #ids, 500 do
    local last = math.min(first + 499, #ids)
    redis.call('XACK', stream, GROUP, unpack(ids, first, last))
    redis.call('XDEL', stream, unpack(ids, first, last))
  end
end

local function add(stream, group_id, version, schema, is_evaluation, payload)
  if is_evaluation then
    redis.call('XADD', stream, '*', 'group_id', group_id, 'attempt', '1', 'weight_version', version,
      'created_at', NOW, 'schema', schema, 'evaluation', '1', 'payload', payload)
  else
    redis.call('XADD', stream, '*', 'group_id', group_id, 'attempt', '1', 'weight_version', version,
      'created_at', NOW, 'schema', schema, 'payload', payload)
  end
end

-- Training groups in the streams.
local function live()
  local total = -redis.call('SCARD', EVALUATING)
  for _, stream in ipairs(STREAMS) do total = total + redis.call('XLEN', stream) end
  return total
end

-- Fields of an entry: as the flat list they are stored in, and by name.
local function fields_of(stream, id)
  local found = redis.pcall('XRANGE', stream, id, id)
  if found.err or not found[1] then return nil end
  local flat, named = found[1][2], {}
  for i = 1, #flat, 2 do named[flat[i]] = flat[i + 1] end
  return flat, named
end

-- What was generated of groups that leave the prompts is of no more use.
local function forget_partials(stream, ids)
  if stream ~= PROMPTS or redis.call('HLEN', PARTIALS) == 0 then return end
  for _, id in ipairs(ids) do
    local _, named = fields_of(stream, id)
    if named then redis.call('HDEL', PARTIALS, named.group_id or '') end
  end
end

-- Whether there is something for the next holder of a group to go on from, who looks for it only then.
local function is_begun(stream, group_id)
  return stream == PROMPTS and redis.call('HEXISTS', PARTIALS, group_id or '') == 1
end

-- The attempt that an entry starts with; 1 where it says nothing sensible.
local function first_attempt(value)
  local number = tonumber(value)
  return number and number >= 1 and number < 1e6 and math.floor(number) or 1
end

-- "prompts" of "{run}:prompts".
local function name_of(stream) return string.match(stream, '[^:]+$') end

-- From a stream to the dead letters, with all that is known about it.
local function bury(stream, id, attempt, reason)
  local _, named = fields_of(stream, id)
  if named then
    local letter = {'XADD', DEAD_LETTERS, '*', 'stream', name_of(stream), 'reason', reason,
      'attempt', attempt, 'dead_at', NOW}
    for _, name in ipairs({'group_id', 'weight_version', 'created_at', 'schema', 'evaluation', 'payload'}) do
      if named[name] then
        letter[#letter + 1] = name
        letter[#letter + 1] = named[name]
      end
    end
    redis.call(unpack(letter))
    if named.evaluation == '1' then
      redis.call('SREM', EVALUATING, named.group_id or '')
      count('eval_dead', 1)
    else
      count('dead', 1)
    end
  end
  forget_partials(stream, {id})
  remove_all(stream, {id})
end

-- Back to the end of its stream, for anyone, to be tried as the given attempt. A new entry wakes a
-- waiting reader and shows in the consumer group's lag; a pending one would do neither.
local function give_back(stream, id, attempt)
  local flat, named = fields_of(stream, id)
  if flat then
    local has_partial = is_begun(stream, named.group_id)
    local entry = {'XADD', stream, '*'}
    for i = 1, #flat, 2 do
      entry[#entry + 1] = flat[i]
      entry[#entry + 1] = flat[i] == 'attempt' and attempt or flat[i + 1]
    end
    if not named.attempt then
      entry[#entry + 1] = 'attempt'
      entry[#entry + 1] = attempt
    end
    if has_partial and not named.partial then
      entry[#entry + 1] = 'partial'
      entry[#entry + 1] = '1'
    end
    redis.call(unpack(entry))
  end
  remove_all(stream, {id})
end

