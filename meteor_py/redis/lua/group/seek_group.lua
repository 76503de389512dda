#!lua flags=allow-oom
-- Set where a group continues, and fence its owner.
--
-- KEYS  1 meta  2 group  3 lease  4 events  5 groups
-- ARGV  1 incarnation  2 name of the group  3 offset  4 'floating' if it means "the first there is"
--       5 'force' to take an active group from its owner, else ''  6 id of this request
-- Returns {'OK'}, or {'ACTIVE', owner and term}  {'BEYOND', end of the stream}
--   {'NOSTREAM'}  {'INCARNATION'}
-- Atomic because the owner must not confirm in between, and a repeat must not undo what followed.

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'next')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
local g = redis.call('HMGET', KEYS[2], 'incarnation', 'term', 'sought')
if g[1] == ARGV[1] and g[3] == ARGV[6] then return {'OK'} end
local lease = redis.call('GET', KEYS[3])
if lease and g[1] == ARGV[1] and ARGV[5] == '' then return {'ACTIVE', lease} end
if tonumber(ARGV[3]) > tonumber(m[2]) then return {'BEYOND', tonumber(m[2])} end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local term = string.format('%.0f', math.max(tonumber(g[2] or 0) + 1, now))
redis.call('DEL', KEYS[3])
redis.call('HSET', KEYS[2], 'incarnation', ARGV[1], 'start', ARGV[3], 'confirmed', ARGV[3],
           'floating', ARGV[4], 'term', term, 'owner', '', 'nonce', '', 'sought', ARGV[6])
redis.call('SADD', KEYS[5], ARGV[2])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'sought', 'group', ARGV[2],
           'term', term, 'offset', ARGV[3])
return {'OK'}
