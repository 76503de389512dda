#!lua flags=allow-oom
-- Create a shared group, or return the settings of the existing one.
--
-- KEYS  1 meta  2 state  3 shared (group names)  4 the subscriber group of that name  5 groups (its
--       ordering keys)
-- ARGV  1 incarnation  2 name  3 'create', or '' if it must exist  4 first offset, '' for the end
--       5 incarnation of the group, never reused  6... settings: field, value, ...
-- Returns {'OK', fields and values of the state}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
--   {'EXCLUSIVE'}: a subscriber group has that name
-- Atomic because if two clients create it with different settings, all settings must be from one of
-- them.

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'next')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
local found = redis.call('HGET', KEYS[2], 'incarnation') or ''
if string.match(found, '^[^.]*') ~= ARGV[1] then
  if ARGV[3] == '' then return {'NOGROUP'} end
  if redis.call('HGET', KEYS[4], 'incarnation') == ARGV[1] then return {'EXCLUSIVE'} end
  local start = ARGV[4]
  if start == '' or tonumber(start) > tonumber(m[2]) then start = m[2] end
  redis.call('HSET', KEYS[2], 'incarnation', ARGV[1] .. '.' .. ARGV[5], 'start', start, 'next', start,
             'waiting', '0', 'bell', '0', unpack(ARGV, 6))
  redis.call('HSET', KEYS[5], '', string.rep('-', 65))  -- padding: see shared/join.lua
end
redis.call('SADD', KEYS[3], ARGV[2])
return {'OK', redis.call('HGETALL', KEYS[2])}
