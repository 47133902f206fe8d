-- Groups whose effect was lost with the weights go back to the prompts. ARGV: limit, max_length,
-- schema, then for each: group id, version, payload. Accepts from the front and returns how many;
-- a group that is not uncommitted (any more) counts as accepted and is left alone.
local before = replied()
if before then return before[1] end

local limit, max_length, schema = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local num_live, length = live(), redis.call('XLEN', PROMPTS)
local accepted, moved = 0, 0
for i = 7, #ARGV, 3 do
  if redis.call('HEXISTS', UNCOMMITTED, ARGV[i]) == 1 then
    if num_live >= limit or length >= max_length then break end
    add(PROMPTS, ARGV[i], ARGV[i + 1], schema, '0', ARGV[i + 2])
    redis.call('HDEL', UNCOMMITTED, ARGV[i])
    num_live, length, moved = num_live + 1, length + 1, moved + 1
  end
  accepted = accepted + 1
end
count('trained', -moved)
return reply({accepted})[1]
