-- Library for scripts that append frames to the log. Each script has KEYS  1 log  2 meta and
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown.
-- publish.lua runs once per frame, so this library is written for speed: it creates no tables and few
-- functions, formats whole numbers with '%d', which takes half as long as '%.0f', and calls the
-- server only if it must. Each of these measures saves a few percent.

local format, call = string.format, redis.call

local m = call('HMGET', KEYS[2], 'incarnation', 'history', 'epoch', 'next', 'appended',
               'capacity', 'archived', 'max_unarchived', 'keep', 'large', 'group_by')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', m[2]} end

-- The append time in ms. It never decreases, even if the server's clock does. Join the seconds and the
-- first three of six microsecond digits: arithmetic would take longer.
local clock = call('TIME')
local now = clock[1] .. string.sub('00000' .. clock[2], -6, -4)
if #now < #m[5] or (#now == #m[5] and now < m[5]) then now = m[5] end

-- Append a frame of n records (n is a string) to the log at the offset `first`. If there is an index,
-- append to it the items of the list `entries` from `start` on. Trim both, and advance meta.
-- If there is no crc, pass ''.
-- Return nil on success. If the frame must be refused, write nothing and return the reply to send.
local function append_frame(first, n, name, payload, crc, index, entries, start)
  local count = tonumber(n) or 0
  if n ~= '1' and (count < 1 or count > 99999 or format('%d', count) ~= n) then return {'INVALID'} end
  if index then -- records/ordering_index.py describes its entries
    if #entries - start + 1 ~= 2 * math.ceil(count / 64) then return {'INVALID'} end
    for i = start, #entries, 2 do
      local numbers, keys = entries[i], entries[i + 1]
      if #numbers ~= math.min(count - 32 * (i - start), 64) or #keys > 17000 then return {'INVALID'} end
    end
  end
  local after = first + count
  if after > 9007199254740991 then return {'EXHAUSTED'} end
  local floor = after - tonumber(m[6])
  if m[7] then
    local archived = tonumber(m[7])
    -- If everything is archived, the stream is never FULL: there would be nothing to wait for.
    if after - archived > tonumber(m[8]) and archived < first then return {'FULL', archived} end
    floor = math.min(floor, archived)
  end

  local bytes, marks, known
  if m[9] then
    -- Retention by age and bytes. 'bytes' counts the bytes of all frames ever appended. A mark has
    -- 48 digits: a frame's offset, the value of 'bytes' after it, and its append time. Records
    -- before a mark are at least as old as the mark. So if a mark exceeds a limit, the ring can
    -- start after it, and no frame needs to be read. Marks are at least a 32nd of a limit apart, and
    -- there are at most 128. A call drops the records up to the oldest such mark and at most 10,000
    -- records after it, so that other clients do not wait long.
    local sub = string.sub
    local age, most = string.match(m[9], '^(%d*):(%d*)$')
    age, most = tonumber(age) or math.huge, tonumber(most) or math.huge
    local r = call('HMGET', KEYS[2], 'bytes', 'marks')
    local before = tonumber(r[1] or 0)
    bytes, marks, known = before + #payload + 32, r[2] or '', r[2]

    if first > 0 and (marks == '' or (tonumber(sub(marks, -48, -33)) < first - 1 and
        (bytes - sub(marks, -32, -17) >= most / 32 or now - sub(marks, -16) >= age / 32))) then
      marks = marks .. format('%016.0f%016.0f%016.0f', first - 1, before, m[5])
      if #marks > 6144 then -- the archiver lags behind, so drop every second mark
        local mark = string.rep('%d', 48)
        marks = string.gsub(marks, mark .. '(' .. mark .. ')', '%1')
      end
    end

    local at, oldest = 1, nil
    while at < #marks do
      local offset = tonumber(sub(marks, at, at + 15))
      if m[7] and offset >= tonumber(m[7]) then break end
      if bytes - sub(marks, at + 16, at + 31) < most * 31 / 32
          and now - sub(marks, at + 32, at + 47) < age then break end
      oldest = oldest or offset
      if offset - oldest > 10000 then break end
      floor = math.max(floor, offset + 1)
      at = at + 48
    end
    marks = sub(marks, at)
    m[5] = now
  end

  local minid = floor > 0 and format('%d', floor) or '0'
  local id = format('%d', after - 1) .. '-' .. n
  if crc ~= '' then
    call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, name, payload, 'crc', crc)
  elseif floor > 0 then
    call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, name, payload)
  else -- the ring is not full yet
    call('XADD', KEYS[1], id, 't', now, name, payload)
  end
  if index then
    -- Do not trim the index beyond `first`: the log keeps the whole new frame.
    if floor > 0 then minid = index_floor(index, math.min(floor, first)) end
    for i = start, #entries, 2 do
      local up_to = 32 * (i - start) + #entries[i]
      call('XADD', index, 'MINID', '=', minid, format('%d-%d', first + up_to - 1, up_to),
           entries[i], entries[i + 1])
    end
  end
  call('HSET', KEYS[2], 'next', format('%d', after), 'appended', now)
  if bytes then
    call('HSET', KEYS[2], 'bytes', format('%d', bytes))
    if marks ~= known then call('HSET', KEYS[2], 'marks', marks) end
  end
  -- 'large' tells readers how many frames to fetch at once (log/ring_reader.py): the offset
  -- after the last frame larger than 512 KiB, and the size of the largest frame before that offset.
  local size = #payload
  if size > 524288 or not m[10] then
    local largest = m[10] and tonumber(string.match(m[10], ':(%d+)')) or 0
    -- If the field is missing, an older release may have written frames of any size.
    if not m[10] and first > 0 then largest = 33554432 end
    m[10] = format('%d:%d', size > 524288 and after or first, math.max(size, largest))
    call('HSET', KEYS[2], 'large', m[10])
  end
end
