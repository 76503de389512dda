#!lua flags=allow-oom
-- Note that records are going to be deleted from the store.
--
-- KEYS  1 meta  2... groups that must have confirmed them
-- ARGV  1 incarnation  2 offset: all below goes
-- Returns {'OK', first offset that stays}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOSTORE'}
-- Atomic because it never goes back, and not past what is archived, or wanted by a group.

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'archived', 'expired')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if not m[2] then return {'NOSTORE'} end
local to = math.min(tonumber(ARGV[2]), tonumber(m[2]))
for i = 2, #KEYS do
  local g = redis.call('HMGET', KEYS[i], 'incarnation', 'confirmed', 'start')
  local at = tonumber(g[2] or g[3])
  if g[1] == ARGV[1] and at then to = math.min(to, at) end
end
to = math.max(to, tonumber(m[3]))
redis.call('HSET', KEYS[1], 'expired', string.format('%.0f', to))
return {'OK', to}
