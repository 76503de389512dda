#!lua flags=allow-oom
-- Change settings of a stream, and trim the log to a smaller capacity step by step.
--
-- KEYS  1 log  2 meta  3 index, if the stream has, or gets, an ordering key
-- ARGV  1 incarnation  2 new capacity, '' to leave it
--       3... other settings: field, value ('' to remove it), ...
-- Returns {'OK', end of the stream, its 'bytes'}; {'MORE'} if enough was trimmed for one call: call
--   again; {'ORDERED', ordering key}: the stream has another one, and nothing was changed;
--   {'NOSTREAM'}; {'INCARNATION'}.
-- Atomic because a new capacity must not apply before the log was trimmed to it in small steps: the
-- next publish would trim the rest at once and block the server.

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'next', 'archived', 'group_by')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
for i = 3, #ARGV, 2 do
  if ARGV[i] == 'group_by' and m[4] and m[4] ~= ARGV[i + 1] then return {'ORDERED', m[4]} end
end
if ARGV[2] ~= '' then
  local floor = tonumber(m[2]) - tonumber(ARGV[2])
  if m[3] then floor = math.min(floor, tonumber(m[3])) end
  if floor > 0 then
    local id = string.format('%.0f-0', floor)
    local ids, trimmed = {id, KEYS[3] and index_floor(KEYS[3], floor)}, 0
    for i, id in ipairs(ids) do
      trimmed = trimmed + redis.call('XTRIM', KEYS[2 * i - 1], 'MINID', '~', id, 'LIMIT', 1000)
    end
    if trimmed > 0 then return {'MORE'} end
    for i, id in ipairs(ids) do redis.call('XTRIM', KEYS[2 * i - 1], 'MINID', '=', id) end
  end
  redis.call('HSET', KEYS[2], 'capacity', ARGV[2])
end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
  if ARGV[i] == 'group_by' and not m[4] then
    -- The index lacks the records published so far, and those of stages written so far.
    redis.call('HSET', KEYS[2], 'unindexed', '1')
  end
  if ARGV[i] == 'keep' then
    -- Without limits, frames were not counted, so the marks of older frames are wrong. 'bytes'
    -- starts high, so that apply_limits can count existing frames downwards from it.
    redis.call('HDEL', KEYS[2], 'marks')
    redis.call('HSETNX', KEYS[2], 'bytes', '4503599627370496')
  end
end
return {'OK', tonumber(m[2]), tonumber(redis.call('HGET', KEYS[2], 'bytes') or 0)}
