#!lua flags=allow-oom
-- Create the settings key for a stream from a release before 0.3, which kept its settings in meta.
--
-- KEYS  1 meta  2 settings
-- ARGV  1 incarnation
-- Returns {'OK', all fields and values of settings}, or {'NOSTREAM'}  {'INCARNATION'}
-- Atomic because the settings must be complete and belong to this incarnation.
--
-- The script never overwrites existing settings. Only administrators may write them, but other
-- clients can write meta, and may have changed the copies there.

local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if incarnation ~= ARGV[1] then return {incarnation and 'INCARNATION' or 'NOSTREAM'} end
if redis.call('EXISTS', KEYS[2]) == 0 then copy_settings(KEYS[1], KEYS[2]) end
return {'OK', redis.call('HGETALL', KEYS[2])}
