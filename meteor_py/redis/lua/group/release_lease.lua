#!lua flags=allow-oom
-- Give up the lease of a group, and wake the members that wait for it.
--
-- KEYS  1 group  2 lease  3 events
-- ARGV  1 name of the group  2 name of the member  3 nonce
--       4 to let it go only as long as no other member wants it: what the lease is known to hold; else ''
-- Returns {'OK'}, or {'FENCED'}: it was not the caller's any more, or was renewed meanwhile, and
--   nothing was done.
-- Atomic because the lease of the next owner must not be deleted.
--
-- Only the nonce is compared: a caller that lost the reply of 'acquire' does not know its term.

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
