-- For each stream: [length, pending, ms since the oldest pending came, ms since the oldest waiting came,
-- [[consumer, how many it holds], ...]].
local function age(entry_id)
  return math.max(0, NOW_MS - tonumber(string.match(entry_id, '^%d+')))
end

local result = {}
for index, stream in ipairs(STREAMS) do
  local depth = {redis.call('XLEN', stream), 0, 0, 0, {}}
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  local last = '0-0'
  for _, info in ipairs(groups.err and {} or groups) do
    local group = {}
    for i = 1, #info, 2 do group[info[i]] = info[i + 1] end
    if group.name == GROUP then
      last, depth[2] = group['last-delivered-id'], group.pending
    end
  end
  if depth[2] > 0 then
    local pending = redis.call('XPENDING', stream, GROUP)
    depth[3], depth[5] = age(pending[2]), pending[4]
  end
  local waiting = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)
  if waiting[1] then depth[4] = age(waiting[1][1]) end
  result[index] = depth
end
return cmsgpack.pack(result)
