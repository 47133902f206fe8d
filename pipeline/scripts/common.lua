-- In front of every script. All of a run's keys come in KEYS, so that a cluster can route the call.
local STREAMS = {KEYS[1], KEYS[2], KEYS[3]}
local PROMPTS, DEAD_LETTERS, LEDGER = KEYS[1], KEYS[4], KEYS[5]
local UNCOMMITTED, EVALUATING, REPLIES = KEYS[6], KEYS[7], KEYS[8]
local GROUP, CONSUMER, CALL = ARGV[1], ARGV[2], ARGV[3]

local clock = redis.call('TIME')
local NOW_MS = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOW = string.format('%d.%06d', clock[1], clock[2])

-- A client whose connection breaks before the reply sends the call again. Its number tells: then
-- the first reply is given once more and nothing is done twice.
local function replied()
  local last = redis.call('HGET', REPLIES, CONSUMER)
  if last and string.sub(last, 1, #CALL + 1) == CALL .. ' ' then
    return cjson.decode(string.sub(last, #CALL + 2))
  end
end

local function reply(result)
  redis.call('HSET', REPLIES, CONSUMER, CALL .. ' ' .. cjson.encode(result))
  return result
end

-- XACK does not ask who holds the entry, XPENDING does. No such stream: nobody holds anything.
local function holds(stream, id)
  local pending = redis.pcall('XPENDING', stream, GROUP, id, id, 1, CONSUMER)
  return not pending.err and pending[1] ~= nil
end

local function remove(stream, id)
  redis.call('XACK', stream, GROUP, id)
  redis.call('XDEL', stream, id)
end

local function count(counter, amount)
  if amount ~= 0 then redis.call('HINCRBY', LEDGER, counter, amount) end
end

local function add(stream, group_id, version, schema, evaluation, payload)
  if evaluation == '1' then
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
  local found = redis.call('XRANGE', stream, id, id)
  if not found[1] then return nil end
  local flat, named = found[1][2], {}
  for i = 1, #flat, 2 do named[flat[i]] = flat[i + 1] end
  return flat, named
end

-- An evaluation group leaves the streams; says whether it was one.
local function leave_evaluation(evaluation, group_id, counter)
  if evaluation ~= '1' then return false end
  redis.call('SREM', EVALUATING, group_id)
  count(counter, 1)
  return true
end

-- "prompts" of "{run}:prompts".
local function name_of(stream) return string.match(stream, '[^:]+$') end

-- From a stream to the dead letters, with all that is known about it.
local function bury(index, id, attempt, reason)
  local stream = STREAMS[index]
  local _, named = fields_of(stream, id)
  if named then
    local letter = {'XADD', DEAD_LETTERS, '*', 'stream', name_of(stream), 'reason', reason, 'attempt', attempt, 'dead_at', NOW}
    for _, name in ipairs({'group_id', 'weight_version', 'created_at', 'schema', 'evaluation', 'payload'}) do
      if named[name] then
        letter[#letter + 1] = name
        letter[#letter + 1] = named[name]
      end
    end
    redis.call(unpack(letter))
    if not leave_evaluation(named.evaluation, named.group_id or '', 'eval_dead') then count('dead', 1) end
  end
  remove(stream, id)
end

-- Back to the end of its stream, for anyone, at the given attempt.
local function give_back(stream, id, attempt)
  local flat = fields_of(stream, id)
  if flat then
    local entry = {'XADD', stream, '*'}
    local has_attempt = false
    for i = 1, #flat, 2 do
      local is_attempt = flat[i] == 'attempt'
      entry[#entry + 1] = flat[i]
      entry[#entry + 1] = is_attempt and attempt or flat[i + 1]
      has_attempt = has_attempt or is_attempt
    end
    if not has_attempt then
      entry[#entry + 1] = 'attempt'
      entry[#entry + 1] = attempt
    end
    redis.call(unpack(entry))
  end
  remove(stream, id)
end

