#!lua flags=allow-oom
-- Note that records are going to be deleted from the store.
--
-- KEYS  1 meta
-- ARGV  1 incarnation  2 offset: all below goes
-- Returns {'OK', first offset that stays}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOSTORE'}
-- Atomic because it never goes back, and not past what is archived.

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'archived', 'expired')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if not m[2] then return {'NOSTORE'} end
local to = math.min(math.max(tonumber(ARGV[2]), tonumber(m[3])), tonumber(m[2]))
redis.call('HSET', KEYS[1], 'expired', string.format('%.0f', to))
return {'OK', to}
