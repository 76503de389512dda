#!lua flags=allow-oom
-- Vote, and decide as soon as the outcome is certain.
--
-- KEYS  1 what the keys of the group begin with
-- ARGV  1 poll  2 member  3 its session  4 y, n or a
-- Returns {'OK', 1 if it counted, else 0: too late, or twice, or not asked}, or {'NOGROUP'}
--   {'FENCED'}: the member is somebody else now
-- Atomic because votes are counted once, and the last that is needed decides.

local m = read_member(ARGV[2])
if not m or m.session ~= ARGV[3] then return {'FENCED'} end
local votes = P .. 'votes:' .. ARGV[1]
if not call('ZSCORE', POLLS, ARGV[1]) or call('HGET', votes, ARGV[2]) ~= '-' then return {'OK', 0} end
call('HSET', votes, ARGV[2], ARGV[4])
count(ARGV[1])
return {'OK', 1}
