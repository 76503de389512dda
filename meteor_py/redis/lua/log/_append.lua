-- Library of the scripts that append frames to the log. Each of them has KEYS  1 log  2 meta and
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown.
-- This library creates no tables and few functions: publish.lua runs once per frame, and each table
-- or function costs a few percent.

local format = string.format

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'history', 'epoch', 'next', 'appended',
                     'capacity', 'archived', 'max_unarchived', 'keep', 'large', 'group_by')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', m[2]} end

-- Return the append time in ms. It never decreases, even if the server's clock does.
local function append_time()
  local clock = redis.call('TIME')
  return format('%.0f', math.max(clock[1] * 1000 + math.floor(clock[2] / 1000), tonumber(m[5])))
end

-- Append a frame of n records (n is a string) at the offset `first`, and its entries (...) to the
-- index if there is one. Trim both, and advance meta. Pass '' if there is no crc.
-- Returns nil, or the reply that refuses the frame; then nothing was written.
local function append_frame(first, n, now, name, payload, crc, index, ...)
  if not string.find(n, '^[1-9]%d?%d?%d?%d?$') then return {'INVALID'} end
  local entries, count = select('#', ...), tonumber(n)
  if index then -- the form of its entries: see records/ordering_index.py
    if entries ~= 2 * math.ceil(count / 64) then return {'INVALID'} end
    for i = 1, entries, 2 do
      local numbers, keys = select(i, ...)
      if #numbers ~= math.min(count - 32 * (i - 1), 64) or #keys > 17000 then return {'INVALID'} end
    end
  end
  local after = first + count
  if after > 9007199254740991 then return {'EXHAUSTED'} end
  local floor = after - tonumber(m[6])
  if m[7] then
    local archived = tonumber(m[7])
    -- Never FULL if everything is archived: there would be nothing to wait for.
    if after - archived > tonumber(m[8]) and archived < first then return {'FULL', archived} end
    floor = math.min(floor, archived)
  end

  local bytes, marks, known
  if m[9] then
    -- Retention by age and bytes. 'bytes' counts the bytes of all frames ever appended. A mark is
    -- 48 digits: an offset, the value of 'bytes' after its frame, and the append time of that
    -- frame. The records up to a mark are at least as old as it, so a mark that is due gives the
    -- new start of the ring without reading a frame. Marks are a 32nd of a limit apart, and there
    -- are at most 128. A call drops about 10,000 records at most: other clients must not wait long.
    local sub = string.sub
    local age, most = string.match(m[9], '^(%d*):(%d*)$')
    age, most = tonumber(age) or math.huge, tonumber(most) or math.huge
    local r = redis.call('HMGET', KEYS[2], 'bytes', 'marks')
    local before = tonumber(r[1] or 0)
    bytes, marks, known = before + #payload + 32, r[2] or '', r[2]

    if first > 0 and (marks == '' or (tonumber(sub(marks, -48, -33)) < first - 1 and
        (bytes - sub(marks, -32, -17) >= most / 32 or now - sub(marks, -16) >= age / 32))) then
      marks = marks .. format('%016.0f%016.0f%016.0f', first - 1, before, m[5])
      if #marks > 6144 then -- the archiver lags behind: forget every second mark
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

  local minid = format('%.0f-0', math.max(floor, 0))
  local id = format('%.0f-', after - 1) .. n
  if crc == '' then
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, name, payload)
  else
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, name, payload, 'crc', crc)
  end
  if index then
    if floor > 0 then minid = index_floor(index, floor) end
    for i = 1, entries, 2 do
      local numbers, keys = select(i, ...)
      local up_to = 32 * (i - 1) + #numbers
      redis.call('XADD', index, 'MINID', '=', minid, format('%.0f-%d', first + up_to - 1, up_to),
                 numbers, keys)
    end
  end
  redis.call('HSET', KEYS[2], 'next', format('%.0f', after), 'appended', now)
  if bytes then
    redis.call('HSET', KEYS[2], 'bytes', format('%.0f', bytes))
    if marks ~= known then redis.call('HSET', KEYS[2], 'marks', marks) end
  end
  -- 'large' tells readers how many frames they may fetch at once (log/ring_reader.py): the offset
  -- from which on no frame has more than 512 KiB, and the bytes of the largest frame before it.
  local size = #payload
  if size > 524288 or not m[10] then
    local largest = m[10] and tonumber(string.match(m[10], ':(%d+)')) or 0
    -- If the field is missing, an older release may have written frames of any size.
    if not m[10] and first > 0 then largest = 33554432 end
    m[10] = format('%.0f:%.0f', size > 524288 and after or first, math.max(size, largest))
    redis.call('HSET', KEYS[2], 'large', m[10])
  end
end
