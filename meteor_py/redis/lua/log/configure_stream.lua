#!lua flags=allow-oom
-- Change settings of a stream, and trim the log to a smaller capacity step by step.
--
-- KEYS  1 log  2 meta  3 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 new capacity, '' to leave it  3... other settings: field, value, ...
-- Returns {'OK'}; {'MORE'} when enough was trimmed for one call: call again; {'NOSTREAM'};
--   {'INCARNATION'}.
-- Atomic because a capacity must not be in force before the log was trimmed to it in small steps:
-- the next publish would trim the rest at one go and block the server.

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'next', 'archived')
if not m[1] then return {'NOSTREAM'} end
if m[1] ~= ARGV[1] then return {'INCARNATION'} end
if ARGV[2] ~= '' then
  local floor = tonumber(m[2]) - tonumber(ARGV[2])
  if m[3] then floor = math.min(floor, tonumber(m[3])) end
  if floor > 0 then
    local id = string.format('%.0f-0', floor)
    local logs, trimmed = {KEYS[1], KEYS[3]}, 0
    for _, key in ipairs(logs) do
      trimmed = trimmed + redis.call('XTRIM', key, 'MINID', '~', id, 'LIMIT', 1000)
    end
    if trimmed > 0 then return {'MORE'} end
    for _, key in ipairs(logs) do redis.call('XTRIM', key, 'MINID', '=', id) end
  end
  redis.call('HSET', KEYS[2], 'capacity', ARGV[2])
end
if #ARGV > 2 then redis.call('HSET', KEYS[2], unpack(ARGV, 3)) end
return {'OK'}
