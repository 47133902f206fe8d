-- Some commands at one instant. Unlike MULTI a full server takes it, as long as the commands themselves write nothing.
-- KEYS: one of the run, so that a cluster can route the call; who may only read some others needs no right to write them.
-- ARGV: the commands, each a list of words, as one msgpack value. Returns: the replies.
local replies = {}
for i, command in ipairs(cmsgpack.unpack(ARGV[1])) do replies[i] = redis.call(unpack(command)) end
return replies
