-- 5. Scan each new record once: grant it, let it wait, or settle it if it is to be purged.
local SCAN = 512 -- a call stops after scanning this many records, or slightly more
local nxt, stored_stop, pushed = p.next, 0, {} -- pushed: by key, the line of offsets to append
local scan_until, keyless = nxt + SCAN, nil -- keyless: the key for records without one

-- The current index entry: its first and last offset, the number of each record's key, the bytes per
-- number, and the keys, packed and unpacked. Publishers write the index, and a publisher may be hostile.
-- Therefore, the records of a malformed entry count as keyless, and an entry never reaches beyond the
-- end of the stream. An entry has one of two forms (see records/ordering_index.py); the older form has
-- two bytes per number, and keys that are not packed.
local first, last, numbers, width, packed, keys_of = nxt, nxt - 1, '', 1, '', false
local lost_to = 0 -- if this is above `nxt`, the records from `nxt` to `lost_to` - 1 are lost
if tonumber(ARGV[8]) == nxt then
  if ARGV[9] == 'lost' then
    lost_to = min(tonumber(ARGV[10]) or 0, stream_end)
  else
    last, numbers, packed = min(nxt + #ARGV[9], stream_end) - 1, ARGV[9], ARGV[10]
  end
end
local listed, at_entry, per_entry = false, 0, SCAN -- read one entry first: it may be large
local row_size = 1
while lost_to > nxt or (got < want and not (stop or cut) and nxt < scan_until and p.waiting < room
                        and nxt < stream_end) do
  if nxt > p.next and loaded > LOADS then break end
  if lost_to <= nxt and nxt > last then
    at_entry = at_entry + 1
    if not (listed and listed[at_entry]) then
      local count = min(floor((want - got) / per_entry) + 1, 64)
      listed, at_entry = call('XRANGE', KEYS[2], text(nxt) .. '-0', '+', 'COUNT', count), 1
    end
    local found = listed[at_entry]
    if found then
      local id_offset, id_size = match(found[1], '^(%d+)-(%d+)$')
      local strings, size = found[2], max(tonumber(id_size), 1)
      numbers, width, packed, keys_of = strings[1] or '', 1, '', false
      if #strings == 2 and #numbers == (size - 1) % 64 + 1 then
        size, packed = #numbers, strings[2]
      elseif #numbers == 2 * size then
        width, keys_of = 2, {}
        for i = 2, #strings do keys_of[i - 1] = strings[i] end
      end
      per_entry = size
      last = tonumber(id_offset)
      first, last = max(last - size + 1, 0), min(last, stream_end - 1)
    else
      first, last = stream_end, stream_end - 1
    end
    if first > nxt then
      local to, elsewhere = min(first, stream_end), call('HMGET', KEYS[1], 'store', 'unindexed')
      if elsewhere[1] or elsewhere[2] then -- the store, or an unindexed part of the ring, may have them
        stored_stop = to
        break
      end
      lost_to = to
    elseif nxt > last then
      break -- a hostile entry that ends before it begins
    end
  end

  if lost_to > nxt then
    lost[#lost + 1] = text(nxt) .. ':' .. text(lost_to - 1)
    call('HSET', KEYS[3], 'lost_last', lost[#lost])
    p.lost, nxt = p.lost + lost_to - nxt, lost_to
  else
    -- Read the keys of the next records in the entry. Each row can be four times as long as the last, so
    -- that few rows are needed if no record can be granted.
    local low, count = nxt - first, min(last - nxt + 1, max(want - got, row_size))
    row_size = 4 * row_size
    local row, key_numbers = {}, nil
    if width == 1 then
      key_numbers = {byte(numbers, low + 1, low + count)}
    else
      key_numbers = {}
      local bytes = {byte(numbers, 2 * low + 1, 2 * (low + count))}
      for i = 1, #bytes, 2 do key_numbers[#key_numbers + 1] = bytes[i] + 256 * (bytes[i + 1] or 0) end
    end
    local only -- the key of the record, if the row has only one record
    if count == 1 and not keys_of then
      -- Skip the keys before this one, which is cheaper than unpacking all 64. In a MessagePack array,
      -- the byte before a string of fewer than 32 bytes is 160 + its length. For other items, unpack
      -- all.
      local position = byte(packed) == 220 and 4 or 2
      local head = byte(packed, position) or 0
      for _ = 1, key_numbers[1] or 0 do
        if head < 160 or head > 191 then break end
        position = position + head - 159
        head = byte(packed, position) or 0
      end
      if head >= 160 and head <= 191 then only = sub(packed, position + 1, position + head - 160) end
    end
    if not (only or keys_of) then
      local ok, unpacked = false, nil
      if #packed <= 66500 then ok, unpacked = pcall(cmsgpack.unpack, packed) end
      keys_of = ok and type(unpacked) == 'table' and unpacked or {}
    end
    for i = 1, count do
      local k = only or keys_of[(key_numbers[i] or -1) + 1]
      if k == nil or k == '' or type(k) ~= 'string' or #k > 256 then
        if not keyless then
          local found = call('HMGET', KEYS[3], 'ungrouped', 'default_group')
          keyless = found[1] == 'free' and '' or found[2]
        end
        k = keyless
      end
      row[i] = k
    end
    load(row)
    local purge_to = p.purging > 0 and {} -- by key, the offset before which its records are purged
    for i = 1, purge_to and count or 0 do
      local k = row[i]
      if k ~= '' and not purge_to[k] then purge_to[k] = tonumber(call('ZSCORE', KEYS[16], k) or -1) end
    end

    local i = 1
    while i <= count and got < want do
      local k, step = row[i], 1
      local t = entries[k]
      local kind = t and t ~= 0 and type(t)
      if purge_to and (purge_to[k] or -1) > nxt then
        p.purged = p.purged + 1
      elseif t == 0 or k == '' or (kind == 'number' and t < cap) then
        got = got + 1
        granted[got], offsets[got] = k, nxt
        if t then entries[k] = t + 1 end
      elseif kind == 'table' and t.line == '' and not pushed[k] and t.held < cap
        and (t.owner == me or t.owner == NOBODY)
        and not (t.extended and (t.extended.stop ~= FREE or t.extended.suspect >= nxt)) then
        got = got + 1
        granted[got], offsets[got], t.owner, t.held = k, nxt, me, t.held + 1
      else
        local before, line = pushed[k], pack('<I7', nxt)
        while row[i + step] == k and not purge_to do -- include the next records with the same key
          line, step = line .. pack('<I7', nxt + step), step + 1
        end
        pushed[k], p.waiting = before and before .. line or line, p.waiting + step
        if before then -- this call has already told the key's owner, if necessary
        elseif kind ~= 'string' then
          t = as_table(k)
          local x = t.extended
          if t.line == '' and t.held < cap and t.owner ~= NOBODY and not (x and x.stop ~= FREE) then
            tell(t.owner, k)
            if t.owner == me then cut = true end -- the next step claims these records
          end
        elseif #t == 8 then
          local low_byte, high_byte = byte(t, 7, 8)
          if low_byte + 256 * high_byte < cap then tell(sub(t, 1, 6), k) end
        end
      end
      i, nxt = i + step, nxt + step
    end
  end
end
p.next = nxt
if p.purging > 0 then
  local done = call('ZRANGEBYSCORE', KEYS[16], '-inf', text(nxt), 'LIMIT', 0, 64)
  if #done > 0 then p.purging = p.purging - call('ZREM', KEYS[16], unpack(done)) end
end

-- Append the records that must wait to the entries of their keys, or to chunks.
if next(pushed) then
  local long, fields = {}, {}
  for k, line in pairs(pushed) do
    local t = entries[k]
    if type(t) == 'string' and #t + #line <= 7 * NEAR + 8 then
      entries[k] = t .. line
    else
      t = as_table(k)
      local x = t.extended
      local space = x and x.far > 0 and 0 or max(7 * NEAR - #t.line, 0)
      t.line = t.line .. sub(line, 1, space)
      if #line > space then
        x = extend(t)
        if x.far == 0 then x.last = x.first end
        long[#long + 1], fields[#fields + 1] = {k, x, sub(line, space + 1)}, k .. ':' .. text(x.last)
      end
    end
  end
  if #long > 0 then
    local chunks, set = call('HMGET', KEYS[6], unpack(fields)), {}
    for i = 1, #long do
      local k, x, line = unpack(long[i])
      local chunk = x.far > 0 and chunks[i] or ''
      x.far = x.far + #line / 7
      while line ~= '' do
        if #chunk >= 7 * CHUNK then chunk, x.last = '', x.last + 1 end
        local space = 7 * CHUNK - #chunk
        chunk, line = chunk .. sub(line, 1, space), sub(line, space + 1)
        set[#set + 1], set[#set + 2] = k .. ':' .. text(x.last), chunk
      end
    end
    many('HSET', KEYS[6], set)
  end
end

-- 6. Put the granted records into batches.
local sent, batches = {}, {}
c.first, c.holding = c.last + 1, c.holding + got
for low = 1, got, BATCH do
  local high, lowest = min(low + BATCH - 1, got), offsets[low]
  for i = low + 1, high do if offsets[i] < lowest then lowest = offsets[i] end end
  c.last = c.last + 1
  local line, n = to_line(offsets, low, high), text(c.last)
  sent[#sent + 1] = line
  local names = got <= BATCH and granted or {unpack(granted, low, high)}
  batches[#batches + 1], batches[#batches + 2] = n, write_batch(names, line)
  marks[me .. ':' .. n] = lowest
end
if got > 0 then call('HSET', KEYS[17], unpack(batches)) end

