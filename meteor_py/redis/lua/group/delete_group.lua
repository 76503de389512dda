#!lua flags=allow-oom
-- Delete a group: its lease and its confirmed offset.
--
-- KEYS  1 meta  2 group  3 lease  4 events  5 groups
-- ARGV  1 incarnation  2 name of the group
--       3 'force' to delete it even if a member holds its lease, else ''
-- Returns {'OK'}, or {'ACTIVE', owner and term}  {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because a member must not acquire the lease in between.

if redis.call('HGET', KEYS[2], 'incarnation') ~= ARGV[1] then return {'NOGROUP'} end
local lease = redis.call('GET', KEYS[3])
if lease and ARGV[3] == '' then return {'ACTIVE', lease} end

redis.call('DEL', KEYS[2], KEYS[3])
redis.call('SREM', KEYS[5], ARGV[2])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'deleted', 'group', ARGV[2])
return {'OK'}
