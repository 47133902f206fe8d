-- Makes the consumer groups and forgets consumers that are long gone. ARGS: [idle ms].
-- Returns how many groups were made.
local made = 0
for _, stream in ipairs(STREAMS) do
  local result = redis.pcall('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  if not result.err then
    made = made + 1
  elseif string.sub(result.err, 1, 9) ~= 'BUSYGROUP' then
    return result
  end
  for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, GROUP)) do
    local consumer = {}
    for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
    if consumer.pending == 0 and consumer.idle > ARGS[1] and consumer.name ~= CONSUMER then
      redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, consumer.name)
      redis.call('HDEL', REPLIES, consumer.name)
    end
  end
end
return cmsgpack.pack(made)
