#!lua flags=allow-oom
-- Set the time at which a writer's fence expires, and delete expired fences.
--
-- KEYS  1 meta  2 fences  3 expiry times of fences
-- ARGV  1 incarnation  2 writer  3 lifetime of its fence, ms  4 maximum number of fences to delete
-- Returns {'OK', fences deleted}; {'NOSTREAM'}; {'INCARNATION'}
-- Atomic because a fence must not be deleted after its writer has resumed writing.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', KEYS[3], string.format('%.0f', now + tonumber(ARGV[3])), ARGV[2])
local expired = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now),
                           'LIMIT', 0, ARGV[4])
for _, writer in ipairs(expired) do
  redis.call('HDEL', KEYS[2], writer)
  redis.call('ZREM', KEYS[3], writer)
end
return {'OK', #expired}
