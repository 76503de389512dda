#!lua flags=allow-oom
-- Join a shared group as a consumer, or tell a consumer where it stands.
--
-- KEYS  1 meta  2 state  3 leases  4 consumers  5 held by this consumer
-- ARGV  1 incarnation  2 consumer, an id that nobody else has or had  3 name, for people
--       4 'join', or '' if it must have joined
-- Returns {'OK', number of its last step, groups and the offsets held of each, in turn}, or
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'FENCED'}: it was taken for dead
-- Atomic because the number and what is held must fit together: so who has lost an answer learns
-- what became of its step.

local found = redis.call('HGET', KEYS[1], 'incarnation')
if found ~= ARGV[1] then return {found and 'INCARNATION' or 'NOSTREAM'} end
local s = redis.call('HMGET', KEYS[2], 'incarnation', 'lease_ms')
if s[1] ~= ARGV[1] then return {'NOGROUP'} end
local step = string.match(redis.call('HGET', KEYS[4], ARGV[2]) or '', '^%d+')
if not step then
  if ARGV[4] == '' then return {'FENCED'} end
  step = '0'
  redis.call('HSET', KEYS[4], ARGV[2], '0::' .. ARGV[3])
  -- Redis keeps a small hash as a list, and would search it for each group; a long value forbids.
  redis.call('HSET', KEYS[5], '', string.rep('-', 65))
end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', KEYS[3], string.format('%.0f', now + s[2]), ARGV[2])
return {'OK', tonumber(step), redis.call('HGETALL', KEYS[5])}
