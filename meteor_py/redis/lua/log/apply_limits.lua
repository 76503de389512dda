#!lua flags=allow-oom
-- Apply new limits on age and bytes to the frames that are already in the ring.
--
-- KEYS  1 log  2 meta  3 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 the limits that the caller has set, in the format of meta's 'keep' field
--       3 offset below which to drop all archived records  4 end of the stream when the ring was
--       measured
--       5 marks for the frames up to that end (see _append.lua)
-- Returns {'OK'}, even if the limits have changed again and nothing was done; {'MORE'} if there may
--   be more to trim: call again; {'NOSTREAM'}; {'INCARNATION'}.
-- Atomic because publishers may add marks at the same time.

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'keep', 'archived', 'marks')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if m[2] ~= ARGV[2] then return {'OK'} end
local floor = tonumber(ARGV[3])
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
local newer = m[4] or ''
while newer ~= '' and tonumber(string.sub(newer, 1, 16)) < tonumber(ARGV[4]) do
  newer = string.sub(newer, 49)
end
redis.call('HSET', KEYS[2], 'marks', ARGV[5] .. newer)
return {'OK'}
