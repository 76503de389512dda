#!lua flags=allow-oom
-- Create a group if it does not exist, and return its position.
--
-- KEYS  1 meta  2 group  3 lease  4 groups
-- ARGV  1 incarnation  2 name of the group  3 'create', or '' to only read its confirmed offset
--       4 offset at which a new group starts, '' for the end of the stream
--       5 'floating' if that offset means "the first available", else ''
-- Returns {'OK', position}, or {'NOSTREAM'}  {'INCARNATION'}
--   {'NOOFFSET'}: ARGV[3] is '', and the group does not exist or has not confirmed an offset
--   {'BEYOND', end of the stream}: a new group cannot start at ARGV[4], which is beyond the end
-- Atomic because two members that open a group at the same time must agree on its start.
--
-- Groups whose names begin with a dot are internal and not listed.
-- The start is stored, so that no record is skipped if the owner dies before its first confirm.

local g = redis.call('HMGET', KEYS[2], 'incarnation', 'confirmed', 'start')
if g[1] == ARGV[1] and g[2] then return {'OK', tonumber(g[2])} end
if ARGV[3] == '' then return {'NOOFFSET'} end
if g[1] == ARGV[1] then return {'OK', tonumber(g[3])} end

-- The group does not exist, or belongs to an earlier incarnation of the stream.
local start = ARGV[4] == '' and meta[2] or ARGV[4]
if ARGV[5] == '' and tonumber(start) > next_offset then return {'BEYOND', next_offset} end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HSET', KEYS[2], 'incarnation', ARGV[1], 'start', start, 'floating', ARGV[5])
if string.sub(ARGV[2], 1, 1) ~= '.' then redis.call('SADD', KEYS[4], ARGV[2]) end
return {'OK', tonumber(start)}
