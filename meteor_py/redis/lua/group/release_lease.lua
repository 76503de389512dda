#!lua flags=allow-oom
-- Release a group's lease, and wake the members that wait for it.
--
-- KEYS  1 group  2 lease  3 events
-- ARGV  1 name of the group  2 name of the member  3 nonce
--       4 '', or the last known value of the lease key: release the lease only if it still has this
--       value, and let the caller reclaim it until another member acquires it
-- Returns {'OK'}, or {'FENCED'} without doing anything: the caller no longer holds the lease, or has
--   renewed it in the meantime.
-- Atomic because the call must not delete the next owner's lease.
--
-- The script compares only the nonce, because a caller that lost the reply to acquire_lease does not
-- know its term.

local g = redis.call('HMGET', KEYS[1], 'nonce', 'term')
if g[1] ~= ARGV[3] then return {'FENCED'} end
if ARGV[4] ~= '' and redis.call('GET', KEYS[2]) ~= ARGV[4] then return {'FENCED'} end

redis.call('DEL', KEYS[2])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[1], 'owner', '')
else
  redis.call('HSET', KEYS[1], 'owner', '', 'nonce', '')
end
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 1000, '*', 'event', 'released', 'group', ARGV[1],
           'member', ARGV[2], 'term', g[2])
return {'OK'}
