#!lua flags=no-writes
-- Return the sizes and append times of frames, newest first.
--
-- KEYS  1 log
-- ARGV  1 ID below which to start
-- Returns {the server's time in ms, ID for the next call ('' at the end), and for each frame its last
--   offset, size in bytes and append time}. Skips entries that are not frames.
-- Atomic only as a side effect: it is a script because XREVRANGE would send whole frames. A call
-- stops after 500 entries, or once it has read 1 MiB.

local clock = redis.call('TIME')
local found = {clock[1] * 1000 + math.floor(clock[2] / 1000), ARGV[1]}
local read = 0
for _ = 1, 500 do
  local entry = redis.call('XREVRANGE', KEYS[1], '(' .. found[2], '-', 'COUNT', 1)[1]
  if not entry then
    found[2] = ''
    break
  end
  found[2] = entry[1]
  local last, fields = tonumber(string.match(entry[1], '^(%d+)-%d+$')), entry[2]
  local time = fields[1] == 't' and tonumber(fields[2])
  if time and fields[4] then
    found[#found + 1] = string.format('%.0f', last)
    found[#found + 1] = string.format('%.0f', #fields[4] + 32)
    found[#found + 1] = string.format('%.0f', time)
  end
  for i = 1, #fields do read = read + #fields[i] end
  if read > 1048576 then break end
end
return found
