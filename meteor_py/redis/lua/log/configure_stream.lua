#!lua flags=allow-oom
-- Change a stream's settings. If the capacity shrinks, first trim the log in small steps.
--
-- KEYS  1 log  2 meta  3 settings  4 index, if the stream has, or gets, an ordering key
-- ARGV  1 incarnation  2 new capacity, '' to keep the current one
--       3... other settings: field, value ('' to remove it), ...
-- Returns {'OK', end of the stream, its 'bytes'}; {'MORE'} if there is more to trim: call again;
--   {'ORDERED', ordering key}: nothing was changed, because the stream already has this other ordering
--   key; {'NOSTREAM'}; {'INCARNATION'}.
-- Atomic because a smaller capacity must not take effect before the log has been trimmed in small
-- steps. Otherwise the next publish would trim the rest at once and block the server.

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'next', 'archived', 'group_by')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
local converted = redis.call('HGET', KEYS[3], 'incarnation') == ARGV[1]
if converted then m[4] = redis.call('HGET', KEYS[3], 'group_by') end
for i = 3, #ARGV, 2 do
  if ARGV[i] == 'group_by' and m[4] and m[4] ~= ARGV[i + 1] then return {'ORDERED', m[4]} end
end
if ARGV[2] ~= '' then
  local floor = tonumber(m[2]) - tonumber(ARGV[2])
  if m[3] then floor = math.min(floor, tonumber(m[3])) end
  if floor > 0 then
    local id = string.format('%.0f-0', floor)
    local logs = {{KEYS[1], id}, KEYS[4] and {KEYS[4], index_floor(KEYS[4], floor)}}
    local trimmed = 0
    for _, log in ipairs(logs) do
      trimmed = trimmed + redis.call('XTRIM', log[1], 'MINID', '~', log[2], 'LIMIT', 1000)
    end
    if trimmed > 0 then return {'MORE'} end
    for _, log in ipairs(logs) do redis.call('XTRIM', log[1], 'MINID', '=', log[2]) end
  end
  redis.call('HSET', KEYS[2], 'capacity', ARGV[2])
end
for i = 3, #ARGV, 2 do
  local hashes = {KEYS[2], converted and is_setting[ARGV[i]] and KEYS[3] or nil}
  for _, key in ipairs(hashes) do
    if ARGV[i + 1] == '' then
      redis.call('HDEL', key, ARGV[i])
    else
      redis.call('HSET', key, ARGV[i], ARGV[i + 1])
    end
  end
  if ARGV[i] == 'group_by' and not m[4] then
    -- Records that were published or staged before this change are not in the index.
    redis.call('HSET', KEYS[2], 'unindexed', '1')
  end
  if ARGV[i] == 'keep' then
    -- If there were no limits until now, publishing did not count frames, so old marks are wrong.
    -- 'bytes' starts high, because the marks that apply_limits adds for existing frames count down
    -- from it.
    redis.call('HDEL', KEYS[2], 'marks')
    redis.call('HSETNX', KEYS[2], 'bytes', '4503599627370496')
  end
end
return {'OK', tonumber(m[2]), tonumber(redis.call('HGET', KEYS[2], 'bytes') or 0)}
