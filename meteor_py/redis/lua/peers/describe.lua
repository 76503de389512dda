#!lua flags=allow-oom
-- Look at a group, and at the number of the last event that made it so.
--
-- KEYS  1 the prefix of the keys of the group
-- ARGV  none
-- Returns {'OK', incarnation, view, its mark, term, leader, session of the leader, members and their records,
--   in turn}, or {'NOGROUP'}
-- Atomic so that a client that reads the events from there on misses nothing, and sees none twice.

return {'OK', incarnation, view, mark, term, leader, session, call('HGETALL', MEMBERS)}
