-- Create a peer group, or return the settings of an existing one.
--
-- KEYS  1 config  2 state  3 members  4 polls  5 orphans  6... other keys that may remain if the
--       server has lost part of the group
-- ARGV  1 id of this incarnation of the group  2... settings: field, value, ...
-- Returns the settings as alternating fields and values.
-- Atomic because if two processes create the group with different settings, one process's settings
-- must win entirely.

if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[2], 'life') == 0 then
  local P = string.sub(KEYS[1], 1, -7)
  local orphans = redis.call('ZRANGE', KEYS[5], 0, -1)
  for _, ids in ipairs({redis.call('HKEYS', KEYS[3]), orphans}) do
    for _, id in ipairs(ids) do
      for _, message in ipairs(redis.call('ZRANGE', P .. 'shared:' .. id, 0, -1)) do
        redis.call('UNLINK', P .. 'body:' .. message)
      end
      redis.call('UNLINK', P .. 'inbox:' .. id, P .. 'movable:' .. id, P .. 'awaited:' .. id,
                 P .. 'shared:' .. id, P .. 'begun:' .. id)
    end
  end
  for _, id in ipairs(redis.call('ZRANGE', KEYS[4], 0, -1)) do
    redis.call('DEL', P .. 'poll:' .. id, P .. 'votes:' .. id)
  end
  redis.call('DEL', unpack(KEYS))
  redis.call('HSET', KEYS[1], unpack(ARGV, 2))
  redis.call('HSET', KEYS[2], 'life', ARGV[1])
end
return redis.call('HGETALL', KEYS[1])
