#!lua flags=allow-oom
-- Return the state of a group, and the number of its last event.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  none
-- Returns {'OK', incarnation, view, its mark, term, leader, session of the leader, members and their
--   records in turn, properties and their values in turn}, or {'NOGROUP'}
-- Atomic so that a client that reads events from that number on misses no event and sees none twice.

return {'OK', incarnation, view, mark, term, leader, session, call('HGETALL', MEMBERS),
        call('HGETALL', PROPERTIES)}
