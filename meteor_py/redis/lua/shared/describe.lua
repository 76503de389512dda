#!lua flags=no-writes
-- Describe a shared group at one instant.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 members  4 letters  5 ready  6 blocked  7 unsettled
-- ARGV  none
-- Returns {incarnation and end of the stream, fields of the group's meta, members, time, numbers of ready
--   and of blocked ordering keys and of letters, then the lowest offset in each of the last three sets}
-- Atomic because 'confirmed' is the lowest unsettled offset, and a record may move between the sets.

local call, first = redis.call, {}
for i = 5, 7 do first[i - 4] = call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES') end
return {call('HMGET', KEYS[1], 'incarnation', 'next'), call('HGETALL', KEYS[2]), call('HGETALL', KEYS[3]),
        call('TIME'), call('ZCARD', KEYS[5]), call('ZCARD', KEYS[6]), call('HLEN', KEYS[4]), first[1],
        first[2], first[3]}
