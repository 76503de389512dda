#!lua flags=allow-oom
-- Make sure that a group exists, and tell where it stands.
--
-- KEYS  1 meta  2 group  3 lease  4 groups
-- ARGV  1 incarnation  2 name of the group  3 'create', or '' to only look for a confirmed offset
--       4 offset at which a new group starts, '' for the end of the stream
--       5 'floating' if that offset means "the first there is", else ''
-- Returns {'OK', position}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOOFFSET'}
-- Atomic because two members that open a group at once must start it at one place.
--
-- One whose name begins with a dot is ours, and not listed.
-- The start is kept: a group that fails over before its first confirm skips nothing.

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'next')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end

local g = redis.call('HMGET', KEYS[2], 'incarnation', 'confirmed', 'start')
if g[1] == ARGV[1] and g[2] then return {'OK', tonumber(g[2])} end
if ARGV[3] == '' then return {'NOOFFSET'} end
if g[1] == ARGV[1] then return {'OK', tonumber(g[3])} end

-- None, or one that an earlier stream of this name has left behind.
local start = ARGV[4] == '' and m[2] or ARGV[4]
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[2], 'incarnation', ARGV[1], 'start', start, 'floating', ARGV[5])
if string.sub(ARGV[2], 1, 1) ~= '.' then redis.call('SADD', KEYS[4], ARGV[2]) end
return {'OK', tonumber(start)}
