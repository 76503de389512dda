#!lua flags=allow-oom
-- Record that the store holds more records, and trim the ring accordingly.
--
-- KEYS  1 log  2 meta  3 the archivers' group  4 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown  3 nonce  4 term
--       5 epoch in which the records were read  6 'archived' as the caller knows it
--       7 new value of 'archived'
-- Returns {'OK'}, even if an earlier call has already done this, or why nothing was done:
--   {'NOSTREAM'}  {'INCARNATION'}  {'HISTORY', history in meta}  {'FENCED', current term}
--   {'EPOCH'}: since the records were read, a new epoch has begun, so the server may have lost them
--   {'MOVED', archived}: 'archived' is no longer ARGV[6], or ARGV[7] is not between it and the end
-- Atomic because the ring must not drop unarchived records, and only the archiver of the current
-- term may advance 'archived'. It also runs on a server that is out of memory, because it frees
-- memory.
--
-- The caller advances in steps, so that one call trims at most 10,000 entries.

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'history', 'epoch', 'next', 'capacity',
                     'archived')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', m[2]} end
local g = redis.call('HMGET', KEYS[3], 'nonce', 'term')
if g[1] ~= ARGV[3] or g[2] ~= ARGV[4] then return {'FENCED', tonumber(g[2] or 0)} end
if m[3] ~= ARGV[5] then return {'EPOCH'} end
local archived, to = tonumber(m[6] or -1), tonumber(ARGV[7])
if archived == to then return {'OK'} end
if archived ~= tonumber(ARGV[6]) or to < archived or to > tonumber(m[4]) then
  return {'MOVED', archived}
end

redis.call('HSET', KEYS[2], 'archived', ARGV[7])
local floor = math.min(tonumber(m[4]) - tonumber(m[5]), to)
if floor > 0 then
  redis.call('XTRIM', KEYS[1], 'MINID', '=', string.format('%.0f-0', floor))
  if KEYS[4] then redis.call('XTRIM', KEYS[4], 'MINID', '=', index_floor(KEYS[4], floor)) end
end
return {'OK'}
