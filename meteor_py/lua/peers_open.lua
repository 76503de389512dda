-- Begin a distributed group, or tell how the one of that name is set up.
--
-- KEYS  1 config  2 state
-- ARGV  1 id of this life of the group  2... settings: field, value, ...
-- Returns all fields and values of the settings.
-- Atomic because of two who begin it, with different settings, one must win whole.

if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], unpack(ARGV, 2))
  redis.call('HSETNX', KEYS[2], 'life', ARGV[1])
end
return redis.call('HGETALL', KEYS[1])
