#!lua flags=allow-oom
-- Renew members' leases, and report the group's state.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 session  2... its members; no members if the client only watches
-- Returns {'OK', incarnation, view, its mark, term, leader, the leader's session, seconds on the server's
--   clock; a list with a number for each member: 1 if it is still in the group, 0 if it was dropped,
--   2 if it was removed on purpose, 3 if another session has joined under its name; ms until the next
--   member is overdue, -1 if there is none; 1 if orphans remain and another call should follow soon; the
--   ttl in ms}, or {'NOGROUP'}
-- Atomic because a member that was dropped must not be renewed.

local presence = {}
for i = 2, #ARGV do
  local m = read_member(ARGV[i])
  local here = m and m.alive == '1' and m.session == ARGV[1]
  if here then renew(ARGV[i]) end
  presence[#presence + 1] = here and 1
    or m and m.session ~= '-' .. ARGV[1] and 3
    or not m and call('ZSCORE', P .. 'removed', ARGV[i]) and 2 or 0
end
local first = call('ZRANGE', DEADLINES, 0, 0, 'WITHSCORES')
local next_ms = first[2] and max(first[2] - now, 0) or -1
local more = orphans and call('EXISTS', ORPHANS) or 0
return {'OK', incarnation, view, mark, term, leader, session, seconds, presence, next_ms, more, TTL}
