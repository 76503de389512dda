#!lua flags=no-writes
-- Return a stream's state, read at one moment.
--
-- KEYS  1 log  2 meta  3 settings, or none
-- ARGV  none
-- Returns {all fields and values of meta, number of frames, ID of the first frame or '', and with the
--   third key: all fields and values of settings}.
-- Atomic so that the bounds are consistent. Read-only: works on a replica and with EVALSHA_RO.

local first = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
return {redis.call('HGETALL', KEYS[2]), redis.call('XLEN', KEYS[1]), first and first[1] or '',
        KEYS[3] and redis.call('HGETALL', KEYS[3])}
