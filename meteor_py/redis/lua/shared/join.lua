#!lua flags=allow-oom
-- Join a shared group as a consumer, or return the state of a consumer.
--
-- KEYS  1 meta  2 state  3 leases  4 consumers  5 held by this consumer  6 failures
-- ARGV  1 incarnation of stream and group  2 consumer, an id that is never reused
--       3 display name  4 'join', or '' if it must have joined before
-- Returns {'OK', number of its last step, {ordering key, offsets held, ...}, {offset, failures, ...} of
--   held records that have failed}, or
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'FENCED'}: its lease has expired
-- Atomic because a consumer that lost a reply learns from the step number and the held records together
-- whether its step was taken.

local found = redis.call('HGET', KEYS[1], 'incarnation')
if found ~= string.match(ARGV[1], '^[^.]*') then
  return {found and 'INCARNATION' or 'NOSTREAM'}
end
local s = redis.call('HMGET', KEYS[2], 'incarnation', 'lease_ms')
if s[1] ~= ARGV[1] and string.match(s[1] or '', '^[^.]*') ~= ARGV[1] then return {'NOGROUP'} end
local step = string.match(redis.call('HGET', KEYS[4], ARGV[2]) or '', '^%d+')
if not step then
  if ARGV[4] == '' then return {'FENCED'} end
  step = '0'
  redis.call('HSET', KEYS[4], ARGV[2], '0::' .. ARGV[3])
  -- Padding: Redis stores a small hash as a list and searches it for each ordering key, unless a value
  -- is longer than 64 bytes.
  redis.call('HSET', KEYS[5], '', string.rep('-', 65))
end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('ZADD', KEYS[3], string.format('%.0f', now + s[2]), ARGV[2])
local held, failed = redis.call('HGETALL', KEYS[5]), {}
if redis.call('EXISTS', KEYS[6]) == 1 then
  for i = 1, #held, 2 do
    for offset in string.gmatch(held[i] == '' and '' or held[i + 1], '%d+') do
      local failures = redis.call('HGET', KEYS[6], offset)
      if failures then
        failed[#failed + 1] = offset
        failed[#failed + 1] = failures
      end
    end
  end
end
return {'OK', tonumber(step), held, failed}
