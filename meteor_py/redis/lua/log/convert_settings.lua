#!lua flags=allow-oom
-- Give a stream that a release before 0.3 created a key for its settings, once.
--
-- KEYS  1 meta  2 settings
-- ARGV  1 incarnation
-- Returns {'OK', all fields and values of settings}, or {'NOSTREAM'}  {'INCARNATION'}
-- Atomic because the settings must be those of this incarnation, and complete.
--
-- Existing settings stay, whatever meta says: more clients may write meta than may write settings.

local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if incarnation ~= ARGV[1] then return {incarnation and 'INCARNATION' or 'NOSTREAM'} end
if redis.call('EXISTS', KEYS[2]) == 0 then copy_settings(KEYS[1], KEYS[2]) end
return {'OK', redis.call('HGETALL', KEYS[2])}
