-- Gives entries back: as new ones, which wakes a waiting reader and shows in the group's lag, with
-- the attempt they were at. ARGV: for each: stream index, id, attempt. Returns 1 or 0 for each.
local before = replied()
if before then return before end

local result = {}
for i = 4, #ARGV, 3 do
  local stream, id, attempt = STREAMS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2]
  local held = holds(stream, id)
  if held then
    give_back(stream, id, attempt)
  end
  result[#result + 1] = held and 1 or 0
end
return reply(result)
