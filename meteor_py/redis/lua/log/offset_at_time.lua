#!lua flags=no-writes
-- Find the first record that was appended at or after a time.
--
-- KEYS  1 log  2 meta
-- ARGV  1 incarnation  2 time, ms
-- Returns {'OK', offset, first offset in the ring}: the first offset of the frame, 'next' if there
--   is none;
--   {'NOSTREAM'}; {'INCARNATION'}; {'FOREIGN', ID} for an entry that is not a frame.
-- Atomic because the ring moves. A binary search over the offsets, at most 53 steps: append times
-- never go back. Done here because each step would otherwise carry a frame to the client.

local function int(x) return string.format('%.0f', x) end

local m = redis.call('HMGET', KEYS[2], 'next', 'appended', 'incarnation')
if not m[1] then return {'NOSTREAM'} end
if m[3] ~= ARGV[1] then return {'INCARNATION'} end
local wanted = tonumber(ARGV[2])
local low, high = 0, tonumber(m[1])
local ring = high
local oldest = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if oldest then
  local last, n = string.match(oldest[1], '^(%d+)-(%d+)$')
  if not last then return {'FOREIGN', oldest[1]} end
  ring = last - n + 1
end
if wanted > tonumber(m[2]) then return {'OK', high, ring} end

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
