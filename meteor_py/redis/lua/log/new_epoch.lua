#!lua flags=allow-oom
-- Begin a new epoch of a stream whose server has another history than when it was last written.
--
-- KEYS  1 meta
-- ARGV  1 incarnation  2 history that the caller found in meta  3 history of the server
-- Returns {'OK'} (also when another client did it first), {'NOSTREAM'}, {'INCARNATION'}, or
--   {'HISTORY', history in meta} when meta holds a third one: look again.
-- Atomic because it is a compare-and-set: two clients must not begin two epochs.
--
-- 'epochs' lists 'epoch:first offset' pairs, both rising, newest last. An entry whose first offset
-- is not below the new one says nothing any more that the new one does not say. Epoch numbers
-- follow the clock, so that one which was itself lost with the tail is not given out again.

local function int(x) return string.format('%.0f', x) end

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'history', 'epoch', 'epochs', 'next')
if not m[1] then return {'NOSTREAM'} end
if m[1] ~= ARGV[1] then return {'INCARNATION'} end
if m[2] == ARGV[3] then return {'OK'} end
if m[2] ~= ARGV[2] then return {'HISTORY', m[2]} end

local clock = redis.call('TIME')
local epoch = math.max(tonumber(m[3]) + 1, clock[1] * 1000 + math.floor(clock[2] / 1000))
local next = tonumber(m[5])
local kept = {}
for number, first in string.gmatch(m[4], '(%d+):(%-?%d+)') do
  if tonumber(first) < next then kept[#kept + 1] = number .. ':' .. first end
end
kept[#kept + 1] = int(epoch) .. ':' .. int(next)
if #kept > 1000 then
  -- Forget the oldest. A reader from before the second can no longer be judged: -1 tells it that
  -- everything it has read may be lost.
  table.remove(kept, 1)
  kept[1] = string.match(kept[1], '^%d+') .. ':-1'
end
redis.call('HSET', KEYS[1], 'history', ARGV[3], 'epoch', int(epoch),
           'epochs', table.concat(kept, ','))
return {'OK'}
