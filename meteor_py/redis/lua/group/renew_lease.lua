#!lua flags=allow-oom
-- Renew a group's lease. Reclaim it in the same term if it has expired or was released.
--
-- KEYS  1 meta  2 group  3 lease  4 events
-- ARGV  1 incarnation  2 name of the group  3 name of the member  4 nonce
--       5 lifetime of the lease, ms  6 term  7 number of this renewal
-- Returns {'OK'}, or {'FENCED', term}: another member has acquired the lease, or it was revoked;
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because only the owner of the term may set the lease.

local g = redis.call('HMGET', KEYS[2], 'incarnation', 'term', 'nonce', 'owner')
if g[1] ~= ARGV[1] then return {'NOGROUP'} end
if g[2] ~= ARGV[6] or g[3] ~= ARGV[4] then return {'FENCED', tonumber(g[2] or 0)} end

redis.call('SET', KEYS[3], ARGV[3] .. ' ' .. ARGV[6] .. ' ' .. ARGV[7], 'PX', ARGV[5])
if g[4] ~= ARGV[3] then -- the lease was released, and no other member has acquired it
  redis.call('HSET', KEYS[2], 'owner', ARGV[3])
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'assigned', 'group', ARGV[2],
             'member', ARGV[3], 'term', ARGV[6])
end
return {'OK'}
