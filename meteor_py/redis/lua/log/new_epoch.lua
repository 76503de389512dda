#!lua flags=allow-oom
-- Begin a new stream epoch if the server's history has changed since the last write.
--
-- KEYS  1 meta
-- ARGV  1 incarnation  2 history that the caller found in meta  3 history of the server
--       4 a random number from 1 to 65,536
-- Returns {'OK'} (even if another client was faster), {'NOSTREAM'}, {'INCARNATION'}, or
--   {'HISTORY', history in meta}: meta has neither history; compare again.
-- Atomic because it is a compare-and-set: two clients must not begin two epochs.
--
-- 'epochs' lists the epochs, oldest first; see records/position.py. If two servers both continue
-- this stream after a failover, they must not choose the same number for different epochs. The clock
-- alone does not prevent that: two servers whose clocks are behind would both add one to the last
-- epoch. ARGV[4] makes their numbers differ.

local function int(x) return string.format('%.0f', x) end

if history == ARGV[3] then return {'OK'} end
if history ~= ARGV[2] then return {'HISTORY', history} end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local number = int(math.max(tonumber(epoch), now) + tonumber(ARGV[4]))
local epochs = redis.call('HGET', KEYS[1], 'epochs') .. ',+' .. number .. ':' .. int(next_offset)
local _, commas = string.gsub(epochs, ',', '')
if commas >= 1000 then
  -- Drop the oldest epoch, whose positions can then no longer be checked. The offset -1 in the next
  -- entry means that all records of earlier epochs may have been lost.
  epochs = string.gsub(epochs, '^[^,]*,%+?(%d+):[^,]*', '%1:-1')
end
redis.call('HSET', KEYS[1], 'history', ARGV[3], 'epoch', number, 'epochs', epochs)
return {'OK'}
