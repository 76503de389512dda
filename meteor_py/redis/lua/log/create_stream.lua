-- Create a stream, or return the settings of an existing stream.
--
-- KEYS  1 meta  2 settings
-- ARGV  1 incarnation  2 history of the sender's connection  3... settings: field, value, ...
-- Returns {1 if created else 0, all fields and values of meta, all fields and values of settings}.
-- Atomic because if two clients create a stream with different settings, one must win entirely.

local created = 0
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'version', '1', 'incarnation', ARGV[1], 'history', ARGV[2],
             'epoch', '1', 'epochs', '1:0', 'next', '0', 'appended', '0', unpack(ARGV, 3))
  copy_settings(KEYS[1], KEYS[2])
  created = 1
end
return {created, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
