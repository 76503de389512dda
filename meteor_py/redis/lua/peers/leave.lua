#!lua flags=allow-oom
-- Remove a member from its group, or mark a named member as dead if it may rejoin.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 id  2 its session; '' to remove it, whatever its session  3 'stay' if it may rejoin, else ''
-- Returns {'OK', 1 if it was a member, else 0}, or {'NOGROUP'}
-- Atomic because the member's messages, votes and leadership must end at the same moment.

local m = read_member(ARGV[1])
if not m or (ARGV[2] ~= '' and m.session ~= ARGV[2]) then return {'OK', 0} end
drop(ARGV[1], ARGV[2] == '' and 'removed' or 'left', ARGV[3] == 'stay')
if ARGV[2] == '' then  -- remember it for a day: its process must not rejoin automatically
  call('ZADD', P .. 'removed', int(now), ARGV[1])
  call('ZREMRANGEBYSCORE', P .. 'removed', '-inf', int(now - 86400000))
  call('ZREMRANGEBYRANK', P .. 'removed', 0, -1001)
  call('PEXPIRE', P .. 'removed', 86400000)
end
succeed()
return {'OK', 1}
