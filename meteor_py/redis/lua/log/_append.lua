-- Library of the scripts that append frames to the log. Each of them has KEYS  1 log  2 meta and
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown.
-- It makes no tables: publish.lua runs once per frame, and each table would cost it some percent.

local format = string.format

-- The fields of meta that appending needs, if this is the stream and the history that is meant.
local m = redis.call('HMGET', KEYS[2], 'incarnation', 'history', 'epoch', 'next', 'appended',
                     'capacity', 'archived', 'max_unarchived')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', m[2]} end

-- The time of appending in ms; it never goes back, even if the server's clock does.
local function append_time()
  local clock = redis.call('TIME')
  return format('%.0f', math.max(clock[1] * 1000 + math.floor(clock[2] / 1000), tonumber(m[5])))
end

-- Append a frame of n records (a string), whose first one gets the offset `first`, and its entry
-- (...) to the index if there is one; trim both, and advance meta. crc is '' for none.
-- Returns nil; or the reply that refuses it, and then nothing was written.
local function append_frame(first, n, now, name, payload, crc, index, ...)
  local after = first + tonumber(n)
  if after > 9007199254740991 then return {'EXHAUSTED'} end
  local floor = after - tonumber(m[6])
  if m[7] then
    local archived = tonumber(m[7])
    -- Not if all is archived: there would be nothing to wait for.
    if after - archived > tonumber(m[8]) and archived < first then return {'FULL', archived} end
    floor = math.min(floor, archived)
  end
  local minid = format('%.0f-0', math.max(floor, 0))
  local id = format('%.0f-', after - 1) .. n
  if crc == '' then
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, name, payload)
  else
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, name, payload, 'crc', crc)
  end
  if index then redis.call('XADD', index, 'MINID', '=', minid, id, ...) end
  redis.call('HSET', KEYS[2], 'next', format('%.0f', after), 'appended', now)
end
