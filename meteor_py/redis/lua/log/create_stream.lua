-- Create a stream, or tell what the one of that name is like.
--
-- KEYS  1 meta
-- ARGV  1 incarnation  2 history of the sender's connection  3... settings: field, value, ...
-- Returns {1 if created else 0, all fields and values of meta}.
-- Atomic because of two creators, with different settings, one must win whole.

local created = 0
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'version', '1', 'incarnation', ARGV[1], 'history', ARGV[2],
             'epoch', '1', 'epochs', '1:0', 'next', '0', 'appended', '0', unpack(ARGV, 3))
  created = 1
end
return {created, redis.call('HGETALL', KEYS[1])}
