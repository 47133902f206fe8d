-- Takes over leases that lapsed; buries what was tried too often.
-- ARGS: [stream, lease ms, how many, cursor, max_attempts]. Returns [cursor, [[id, attempt, fields], ...]].
local stream, taken = STREAMS[ARGS[1]], {}
local lease_ms, wanted, cursor, max_attempts = ARGS[2], ARGS[3], ARGS[4], ARGS[5]

-- Fields for whoever takes an entry over, who has to know whether its last holder has saved something.
local function with_partial(fields)
  local group_id
  for i = 1, #fields, 2 do
    if fields[i] == 'group_id' then group_id = fields[i + 1] end
    if fields[i] == 'partial' then return fields end
  end
  if is_begun(stream, group_id) then
    fields[#fields + 1] = 'partial'
    fields[#fields + 1] = '1'
  end
  return fields
end

local function attempt_of(id, first)
  return first_attempt(first) - 1 + redis.call('XPENDING', stream, GROUP, id, id, 1)[1][4]
end

-- This consumer's own, from before a stall or from a reply that got lost: nobody else has tried them
-- since, so that this is no further attempt. JUSTID starts the term anew and does not count.
for _, row in ipairs(redis.call('XPENDING', stream, GROUP, 'IDLE', lease_ms, '-', '+', wanted, CONSUMER)) do
  local id = row[1]
  local is_there = redis.call('XCLAIM', stream, GROUP, CONSUMER, lease_ms, id, 'JUSTID')[1]
  local flat, named = fields_of(stream, id)
  if is_there and flat then taken[#taken + 1] = {id, attempt_of(id, named.attempt), with_partial(flat)} end
end

-- XAUTOCLAIM looks at ten entries for each one wanted; this looks at ten thousand in all.
for _ = 1, math.ceil(1000 / wanted) do
  if #taken >= wanted then break end
  local found = redis.call('XAUTOCLAIM', stream, GROUP, CONSUMER, lease_ms, cursor, 'COUNT', wanted - #taken)
  cursor = found[1]
  for _, entry in ipairs(found[2]) do
    local id, fields, first = entry[1], entry[2], 1
    for i = 1, #fields, 2 do
      if fields[i] == 'attempt' then first = fields[i + 1] end
    end
    local attempt = attempt_of(id, first)
    if attempt > max_attempts then
      bury(stream, id, attempt - 1, string.format('no worker finished it in %d attempts', attempt - 1))
    else
      taken[#taken + 1] = {id, attempt, with_partial(fields)}
    end
  end
  if cursor == '0-0' then break end
end
return cmsgpack.pack({cursor, taken})
