#!lua flags=allow-oom
-- Delete all of a stream's keys, which the caller has found by their prefix.
--
-- KEYS  1 meta  2... the other keys, including the log
-- ARGV  1 incarnation
-- Returns {'OK'}, {'NOSTREAM'} or {'INCARNATION'}.
-- Atomic because the call must not delete the keys of a new stream with the same name.

for i = 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'OK'}
