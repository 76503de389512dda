#!lua flags=allow-oom
-- Cast a vote, and decide as soon as the outcome is certain.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 poll  2 member  3 its session  4 y, n or a
-- Returns {'OK', 1 if the vote counted, 0 if it was too late or repeated, or the member was not asked},
--   or {'NOGROUP'}  {'FENCED'}: another session now owns the member
-- Atomic because each vote must count exactly once, and the vote that settles the outcome must end the
-- poll.

local m = read_member(ARGV[2])
if not m or m.session ~= ARGV[3] then return {'FENCED'} end
-- Each call closes a limited number of polls, so a poll whose time is up may still be listed. Such a
-- poll accepts no votes.
local ends, limit = call('ZSCORE', POLLS, ARGV[1]), call('ZSCORE', LIMITS, ARGV[1])
if not ends or tonumber(ends) <= now or (limit and tonumber(limit) <= now) then return {'OK', 0} end
if call('HGET', P .. 'votes:' .. ARGV[1], ARGV[2]) ~= '-' then return {'OK', 0} end
tally(ARGV[1], {member = ARGV[2], says = ARGV[4]}, 'rejected')
return {'OK', 1}
