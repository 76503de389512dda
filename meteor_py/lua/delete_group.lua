#!lua flags=allow-oom
-- Delete a group: its lease, and the memory of what it has confirmed.
--
-- KEYS  1 group  2 lease  3 events  4 groups
-- ARGV  1 name of the group  2 'force' to take an active group from its owner, else ''
-- Returns {'OK'}, or {'ACTIVE', owner and term}  {'NOGROUP'}
-- Atomic because a member must not take the lease in between.

local lease = redis.call('GET', KEYS[2])
if lease and ARGV[2] == '' then return {'ACTIVE', lease} end
redis.call('SREM', KEYS[4], ARGV[1])
if redis.call('DEL', KEYS[1], KEYS[2]) == 0 then return {'NOGROUP'} end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'event', 'deleted', 'group', ARGV[1])
return {'OK'}
