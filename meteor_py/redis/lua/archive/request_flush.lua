#!lua flags=allow-oom
-- Ask the archiver to archive all that there is without waiting for more.
--
-- KEYS  1 meta
-- ARGV  1 incarnation
-- Returns {'OK', end of the stream}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOSTORE'}
-- Atomic because a stream that is deleted meanwhile must not come back as one field of its meta.

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'next', 'archived')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if not m[3] then return {'NOSTORE'} end
redis.call('HSET', KEYS[1], 'flush', m[2])
return {'OK', tonumber(m[2])}
