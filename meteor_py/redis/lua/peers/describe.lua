#!lua flags=allow-oom
-- Look at a group, and at the number of the last event that made it so.
--
-- KEYS  1 what the keys of the group begin with
-- ARGV  none
-- Returns {'OK', life, view, its mark, term, leader, session of the leader, members and their records,
--   in turn}, or {'NOGROUP'}
-- Atomic so that who reads the events from there on misses nothing, and sees nothing twice.

return {'OK', life, view, mark, term, leader, session, call('HGETALL', MEMBERS)}
