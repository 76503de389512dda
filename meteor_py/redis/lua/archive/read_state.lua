#!lua flags=no-writes
-- Return the part of a stream's state that must be consistent with the end of the stream.
--
-- KEYS  1 meta  2 fences
-- ARGV  1 incarnation
-- Returns {'OK', end of the stream, epoch, epochs, all writers and their fences}, or
--   {'NOSTREAM'}  {'INCARNATION'}
-- Atomic because a fence is correct only for the records that the log has at that moment.

return {'OK', next_offset, tonumber(epoch), redis.call('HGET', KEYS[1], 'epochs'),
        redis.call('HGETALL', KEYS[2])}
