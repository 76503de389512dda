#!lua flags=allow-oom
-- Return a group's state and the number of its last event.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  none
-- Returns {'OK', incarnation, view, its mark, term, leader, the leader's session, alternating members
--   and records, alternating properties and values}, or {'NOGROUP'}
-- Atomic so that a client that reads the events after that number neither misses nor repeats an event.

return {'OK', incarnation, view, mark, term, leader, session, call('HGETALL', MEMBERS),
        call('HGETALL', PROPERTIES)}
