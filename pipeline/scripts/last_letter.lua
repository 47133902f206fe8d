-- The newest dead letter without its payload: [stream, reason], or nothing where there is none.
local found = redis.call('XREVRANGE', DEAD_LETTERS, '+', '-', 'COUNT', 1)[1]
local named, said = {}, {}
for i = 1, found and #found[2] or 0, 2 do named[found[2][i]] = found[2][i + 1] end
if found then said = {named.stream or '', named.reason or ''} end
return cmsgpack.pack(said)
