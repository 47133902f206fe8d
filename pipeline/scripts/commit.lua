-- These groups' effect is in a checkpoint on disk. ARGS: [group ids]. Returns how many were uncommitted.
local committed = 0
for _, group_id in ipairs(ARGS[1]) do committed = committed + redis.call('HDEL', UNCOMMITTED, group_id) end
return cmsgpack.pack(committed)
