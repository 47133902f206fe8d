-- All accounts at one instant: [counters, entries in the streams, those of evaluation, uncommitted].
local total = 0
for _, stream in ipairs(STREAMS) do total = total + redis.call('XLEN', stream) end
return cmsgpack.pack({
  redis.call('HGETALL', LEDGER), total, redis.call('SCARD', EVALUATING), redis.call('HLEN', UNCOMMITTED),
})
