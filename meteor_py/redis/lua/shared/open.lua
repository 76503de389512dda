#!lua flags=allow-oom
-- Create a shared group, or return the settings of the existing one.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 shared (group names)  4 the subscriber group of that
--       name  5 keys  6 state, which releases before 0.3 read first
-- ARGV  1 incarnation  2 name  3 'create', or '' if it must exist  4 first offset, '' for the end
--       5 incarnation of the group, never reused  6... settings: field, value, ...
-- Returns {'OK', fields and values of the group's meta}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
--   {'EXCLUSIVE'}: a subscriber group has that name
--   {'CONVERT'}: a release before 0.3 wrote the group; call shared/convert first
-- Atomic because if two clients create the group with different settings, one client's settings must
-- win entirely.

local call = redis.call
local m = call('HMGET', KEYS[1], 'incarnation', 'next')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if call('TYPE', KEYS[6]).ok == 'hash' or call('HEXISTS', KEYS[2], 'converting') == 1 then
  return {'CONVERT'}
end
local found = call('HMGET', KEYS[2], 'incarnation', 'progress')
if string.match(found[1] or '', '^[^.]*') ~= ARGV[1] or not found[2] then
  if ARGV[3] == '' then return {'NOGROUP'} end
  if call('HGET', KEYS[4], 'incarnation') == ARGV[1] then return {'EXCLUSIVE'} end
  local start = tonumber(m[2])
  if ARGV[4] ~= '' then start = math.min(start, tonumber(ARGV[4])) end
  call('HSET', KEYS[2], 'incarnation', ARGV[1] .. '.' .. ARGV[5], 'start', string.format('%.0f', start),
       'progress', new_progress(start), unpack(ARGV, 6))
  call('HSET', KEYS[5], '', PADDING)
  call('SET', KEYS[6], NOTICE)
end
call('SADD', KEYS[3], ARGV[2])
return {'OK', call('HGETALL', KEYS[2])}
