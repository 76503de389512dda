#!lua flags=allow-oom
-- Move a group's position, and fence its owner.
--
-- KEYS  1 meta  2 group  3 lease  4 events  5 groups
-- ARGV  1 incarnation  2 name of the group  3 offset
--       4 'floating' if the offset means "the first available"
--       5 'force' to move the group even if a member holds its lease, else ''  6 id of this request
-- Returns {'OK'}, or {'ACTIVE', owner and term}  {'BEYOND', end of the stream}
--   {'NOSTREAM'}  {'INCARNATION'}
-- Atomic because the owner must not confirm in between. The id makes retries harmless: without it, a
-- late retry would move the group back. For 'ended', see acquire_lease.

local g = redis.call('HMGET', KEYS[2], 'incarnation', 'term', 'sought', 'nonce', 'confirmed', 'start',
                     'ended')
if g[1] == ARGV[1] and g[3] == ARGV[6] then return {'OK'} end
local lease = redis.call('GET', KEYS[3])
if lease and g[1] == ARGV[1] and ARGV[5] == '' then return {'ACTIVE', lease} end
if tonumber(ARGV[3]) > next_offset then return {'BEYOND', next_offset} end

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local term = string.format('%.0f', math.max(tonumber(g[2] or 0) + 1, now))
redis.call('DEL', KEYS[3])
if g[1] == ARGV[1] and g[4] and g[4] ~= '' then
  local ended = g[4] .. ':' .. (g[5] or g[6]) .. ',' .. (g[7] or '')
  redis.call('HSET', KEYS[2], 'ended', string.sub(ended, 1, 256))
end
redis.call('HSET', KEYS[2], 'incarnation', ARGV[1], 'start', ARGV[3], 'confirmed', ARGV[3],
           'floating', ARGV[4], 'term', term, 'owner', '', 'nonce', '', 'sought', ARGV[6])
redis.call('SADD', KEYS[5], ARGV[2])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'sought', 'group', ARGV[2],
           'term', term, 'offset', ARGV[3])
return {'OK'}
