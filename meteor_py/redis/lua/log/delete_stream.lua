#!lua flags=allow-oom
-- Delete a stream and the keys that were found to belong to it.
--
-- KEYS  1 meta  2... the others (the log among them)
-- ARGV  1 incarnation
-- Returns {'OK'}, {'NOSTREAM'} or {'INCARNATION'}.
-- Atomic because a stream that was created anew under the same name must not lose its keys.

local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if not incarnation then return {'NOSTREAM'} end
if incarnation ~= ARGV[1] then return {'INCARNATION'} end
for i = 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'OK'}
