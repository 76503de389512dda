#!lua flags=no-writes
-- Find the first record that was appended at or after a time.
--
-- KEYS  1 log  2 meta
-- ARGV  1 incarnation  2 time, ms
-- Returns {'OK', offset, first offset in the ring}, or
--   {'NOSTREAM'}  {'INCARNATION'}
--   {'FOREIGN', ID}: an entry is not a frame.
-- The offset is where the record's frame begins, or the end of the stream if there is no such record.
-- Atomic because publishers append and trim concurrently. Append times never decrease, so the script
-- finds the record by a binary search over the offsets, in at most 53 steps. A client doing the same
-- would receive a whole frame at each step.

local function int(x) return string.format('%.0f', x) end

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'next', 'appended')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
local wanted = tonumber(ARGV[2])
local low, high = 0, tonumber(m[2])
local ring = high
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if oldest then
  local last, n = string.match(oldest[1], '^(%d+)-(%d+)$')
  if not last then return {'FOREIGN', oldest[1]} end
  ring = last - n + 1
end
if wanted > tonumber(m[3]) then return {'OK', high, ring} end

local found = high
while low < high do
  local middle = math.floor((low + high) / 2)
  local entry = redis.call('XRANGE', KEYS[1], int(middle) .. '-0', '+', 'COUNT', 1)[1]
  if not entry then
    high = middle
  else
    local last, n = string.match(entry[1], '^(%d+)-(%d+)$')
    local time = entry[2][1] == 't' and tonumber(entry[2][2])
    if not time then return {'FOREIGN', entry[1]} end
    local first = last - n + 1
    if time >= wanted then
      found = first
      high = math.min(first, middle)
    else
      low = last + 1
    end
  end
end
return {'OK', math.max(found, 0), math.max(ring, 0)}
