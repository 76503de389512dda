#!lua flags=allow-oom
-- Record that the oldest records are about to be deleted from the store.
--
-- KEYS  1 meta  2... groups whose unconfirmed records must stay
-- ARGV  1 incarnation  2 offset below which all records may be deleted
-- Returns {'OK', first offset that stays}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOSTORE'}
-- Atomic because 'expired' must never decrease, or pass 'archived' or a group's position.

local s = redis.call('HMGET', KEYS[1], 'archived', 'expired')
if not s[1] then return {'NOSTORE'} end
local to = math.min(tonumber(ARGV[2]), tonumber(s[1]))
for i = 2, #KEYS do
  local g = redis.call('HMGET', KEYS[i], 'incarnation', 'confirmed', 'start')
  local at = tonumber(g[2] or g[3])
  if g[1] == ARGV[1] and at then to = math.min(to, at) end
end
to = math.max(to, tonumber(s[2]))
redis.call('HSET', KEYS[1], 'expired', string.format('%.0f', to))
return {'OK', to}
