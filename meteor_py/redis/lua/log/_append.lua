-- Library of the scripts that append frames to the log. Each of them has KEYS  1 log  2 meta and
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown.

local format = string.format

-- The fields of meta that appending needs; or nil and the reply that refuses.
local function read_meta()
  local m = redis.call('HMGET', KEYS[2], 'incarnation', 'history', 'epoch', 'next', 'appended',
                       'capacity', 'archived', 'max_unarchived')
  if m[1] ~= ARGV[1] then return nil, {m[1] and 'INCARNATION' or 'NOSTREAM'} end
  if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return nil, {'HISTORY', m[2]} end
  return {epoch = tonumber(m[3]), next = tonumber(m[4]), appended = tonumber(m[5]),
          capacity = tonumber(m[6]), archived = m[7] and tonumber(m[7]),
          max_unarchived = m[8] and tonumber(m[8])}
end

-- The time of appending in ms; it never goes back, even if the server's clock does.
local function append_time(meta)
  local clock = redis.call('TIME')
  return format('%.0f', math.max(clock[1] * 1000 + math.floor(clock[2] / 1000), meta.appended))
end

-- Append one frame, and its entry to the index if there is one, and trim both; advance meta.
-- The frame: n records (a string), the name of its format, payload, crc ('' for none), index entry.
-- Returns the offset of its first record; or nil and the reply that refuses it.
local function append_frame(meta, frame, index_key)
  local first = meta.next
  local after = first + tonumber(frame.n)
  if after > 9007199254740991 then return nil, {'EXHAUSTED'} end
  local floor = after - meta.capacity
  if meta.archived then
    -- Not if all is archived: there would be nothing to wait for.
    if after - meta.archived > meta.max_unarchived and meta.archived < first then
      return nil, {'FULL', meta.archived}
    end
    floor = math.min(floor, meta.archived)
  end
  meta.now = meta.now or append_time(meta)
  local minid = format('%.0f-0', math.max(floor, 0))
  local id = format('%.0f-', after - 1) .. frame.n
  if frame.crc == '' then
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', meta.now, frame.format, frame.payload)
  else
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', meta.now, frame.format, frame.payload,
               'crc', frame.crc)
  end
  if index_key then
    redis.call('XADD', index_key, 'MINID', '=', minid, id, unpack(frame.index))
  end
  redis.call('HSET', KEYS[2], 'next', format('%.0f', after), 'appended', meta.now)
  meta.next = after
  return first
end
