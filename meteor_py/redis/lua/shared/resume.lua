#!lua flags=allow-oom
-- Make a parked or delayed ordering key available again, and reset the failure count of its first
-- waiting record.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 keys  4 ready  5 blocked  6 delayed  7 failures
--       8 idle
-- ARGV  1 incarnation of the stream, with or without that of the group  2 ordering key
--       3 prefix of the group's keys, to build the names of its consumers' keys
-- Returns {'OK', 1 if the key was stopped, else 0}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because the key's entry and the sets that list the key must change together.

local key, call = ARGV[2], redis.call
local raw = call('HGET', KEYS[3], key)
if not raw or string.byte(raw) ~= 255 then return {'OK', 0} end
local EXTENDED = '<Bc6HBdddddd' -- see shared/_keys.lua
local FREE, DELAYED, PARKED, BEHIND = 0, 1, 2, 3
local t = {struct.unpack(EXTENDED, raw)}
local owner, held, stop, line = t[2], t[3], t[4], string.sub(raw, t[11])
if stop ~= DELAYED and stop ~= PARKED then return {'OK', 0} end
stop = held > 0 and line ~= '' and BEHIND or FREE
call('ZREM', KEYS[6], key)
if stop == FREE then call('ZREM', KEYS[5], key) end
if line == '' and held == 0 then
  call('HDEL', KEYS[3], key)
  return {'OK', 1}
end
t[4] = stop
call('HSET', KEYS[3], key, struct.pack(EXTENDED, unpack(t, 1, 10)) .. line)
if line == '' then return {'OK', 1} end
local head = struct.unpack('<I7', line)
if call('HDEL', KEYS[7], string.format('%.0f', head)) == 1 then p.failing = p.failing - 1 end
write_progress()
if owner == NOBODY then
  call('ZADD', KEYS[4], head, key)
else
  call('RPUSH', ARGV[3] .. 'more:' .. owner, key)
end
wake(KEYS[8], owner ~= NOBODY and owner or call('ZRANGE', KEYS[8], 0, 0)[1])
return {'OK', 1}
