#!lua flags=allow-oom
-- Cast a vote, and decide as soon as the outcome is certain.
--
-- KEYS  1 the prefix of the keys of the group
-- ARGV  1 poll  2 member  3 its session  4 y, n or a
-- Returns {'OK', 1 if it counted, else 0: too late, repeated, or not asked}, or {'NOGROUP'}
--   {'FENCED'}: another session has the member now
-- Atomic because each vote counts once, and the last one needed decides.

local m = read_member(ARGV[2])
if not m or m.session ~= ARGV[3] then return {'FENCED'} end
-- Closing is bounded, so a poll that is over may still be listed. It takes no vote.
local ends, limit = call('ZSCORE', POLLS, ARGV[1]), call('ZSCORE', LIMITS, ARGV[1])
if not ends or tonumber(ends) <= now or (limit and tonumber(limit) <= now) then return {'OK', 0} end
if call('HGET', P .. 'votes:' .. ARGV[1], ARGV[2]) ~= '-' then return {'OK', 0} end
tally(ARGV[1], {member = ARGV[2], says = ARGV[4]}, 'rejected')
return {'OK', 1}
