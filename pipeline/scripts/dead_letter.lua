-- ARGV: stream index, id, attempt, reason. Returns 1, or 0 when the lease was lost.
local before = replied()
if before then return before[1] end

local index, id = tonumber(ARGV[4]), ARGV[5]
if not holds(STREAMS[index], id) then
  count('refused', 1)
  return reply({0})[1]
end
bury(index, id, ARGV[6], ARGV[7])
return reply({1})[1]
