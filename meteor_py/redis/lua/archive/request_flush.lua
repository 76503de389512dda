#!lua flags=allow-oom
-- Ask the archiver to archive all existing records without waiting for more.
--
-- KEYS  1 meta
-- ARGV  1 incarnation
-- Returns {'OK', end of the stream}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOSTORE'}
-- Atomic because HSET on a stream that was just deleted would create a meta with one field.

if not redis.call('HGET', KEYS[1], 'archived') then return {'NOSTORE'} end
redis.call('HSET', KEYS[1], 'flush', meta[2])
return {'OK', next_offset}
