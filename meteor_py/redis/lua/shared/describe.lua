#!lua flags=no-writes
-- Describe a shared group at one instant, without its members, because there may be many.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 letters  4 ready  5 blocked  6 unsettled
-- ARGV  none
-- Returns {incarnation and end of the stream, fields and values of the group's meta, time, number of
--   ready ordering keys, of blocked ordering keys and of dead letters, then for each of KEYS 4 to 6 its
--   first member and that member's offset}
-- Atomic because 'confirmed' is the lowest unsettled offset, and a record may move between the sets.

local call, first = redis.call, {}
for i = 4, 6 do first[i - 3] = call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES') end
return {call('HMGET', KEYS[1], 'incarnation', 'next'), call('HGETALL', KEYS[2]), call('TIME'),
        call('ZCARD', KEYS[4]), call('ZCARD', KEYS[5]), call('HLEN', KEYS[3]), first[1], first[2], first[3]}
