#!lua flags=allow-oom
-- Make a parked or delayed ordering key available again, and reset its first record's failures.
--
-- KEYS  1 meta  2 state  3 groups  4 ready  5 blocked  6 delayed  7 failures  8 waiting of the ordering
--       key  9 bell
-- ARGV  1 incarnation  2 ordering key  3 prefix of the shared group's keys, from which those of the
--       owner are made
-- Returns {'OK', 1 if it was stopped, else 0}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because its entry and the sets that list it must change together.

local call = redis.call
local found = call('HGET', KEYS[1], 'incarnation')
if found ~= string.match(ARGV[1], '^[^.]*') then
  return {found and 'INCARNATION' or 'NOSTREAM'}
end
local s = call('HMGET', KEYS[2], 'incarnation', 'group_cap')
if s[1] ~= ARGV[1] and string.match(s[1] or '', '^[^.]*') ~= ARGV[1] then return {'NOGROUP'} end
local key = ARGV[2]
local owner, waiting, state = string.match(call('HGET', KEYS[3], key) or '', '^(.-):(%d+):(.-):')
if not state or state == '' then return {'OK', 0} end
call('ZREM', KEYS[5], key)
call('ZREM', KEYS[6], key)
if waiting == '0' then
  if owner == '' then call('HDEL', KEYS[3], key) else call('HSET', KEYS[3], key, owner) end
  return {'OK', 1}
end
local head = call('LINDEX', KEYS[8], 0)
call('HSET', KEYS[3], key, owner .. ':' .. waiting .. '::' .. head)
call('HDEL', KEYS[7], head)
local set = KEYS[4]
if owner ~= '' then
  local _, commas = string.gsub(call('HGET', ARGV[3] .. 'held:' .. owner, key) or '', ',', '')
  set = commas + 1 < tonumber(s[2]) and ARGV[3] .. 'more:' .. owner
end
if set then call('ZADD', set, head, key) end
local bell = call('HINCRBY', KEYS[2], 'bell', 1)
call('XADD', KEYS[9], 'MAXLEN', '=', 8, string.format('%.0f-0', bell), 'c', '')
return {'OK', 1}
