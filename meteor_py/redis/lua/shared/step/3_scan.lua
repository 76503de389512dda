-- 4. Scan new records, each once. Grant the record, let it wait, or settle it if it is to be purged.
local SCAN = 512 -- maximum number of records that one call scans, or slightly more
local nxt, stored_stop = p.next, 0
local function lose(to)
  lost[#lost + 1] = text(nxt) .. ':' .. text(to - 1)
  p.lost, nxt = p.lost + to - nxt, to
  call('HSET', KEYS[3], 'lost_last', lost[#lost])
end
local keyless = free and '' or default

-- Publishers write the index, and a publisher may be hostile. Therefore, the records of a malformed
-- entry count as keyless, and an entry never reaches beyond the end of the stream. An entry has one of
-- two forms (see records/ordering_index.py); the older form has two bytes per record.
local function unpack_keys(packed)
  if #packed > 66500 then return {} end
  local ok, names = pcall(cmsgpack.unpack, packed)
  return ok and type(names) == 'table' and names or {}
end
local function read_entry(id, strings)
  local last, up_to = match(id, '^(%d+)-(%d+)$')
  last, up_to = tonumber(last), max(tonumber(up_to), 1)
  local numbers = strings[1] or ''
  local found = {size = up_to, numbers = numbers, names = {}, width = 1}
  if #strings == 2 and #numbers == (up_to - 1) % 64 + 1 then
    found.size, found.names = #numbers, unpack_keys(strings[2])
  elseif #numbers == 2 * up_to then
    found.width = 2
    for i = 2, #strings do found.names[i - 1] = strings[i] end
  end
  found.first, found.last = max(last - found.size + 1, 0), min(last, stream_end - 1)
  return found
end
local entry, listed, at_entry, per_entry = false, {}, 0, SCAN -- read one entry first: it may be large
if tonumber(ARGV[8]) == nxt then
  if ARGV[9] == 'lost' then
    local to = min(tonumber(ARGV[10]) or 0, stream_end)
    if to > nxt then lose(to) end
  elseif #ARGV[9] > 0 then
    entry = {first = nxt, last = min(nxt + #ARGV[9], stream_end) - 1, numbers = ARGV[9], width = 1,
             names = unpack_keys(ARGV[10])}
  end
end
local function next_entry()
  at_entry = at_entry + 1
  if not listed[at_entry] then
    local count = min(floor((want - got) / per_entry) + 1, 64)
    listed, at_entry = call('XRANGE', KEYS[2], text(nxt) .. '-0', '+', 'COUNT', count), 1
    if not listed[1] then return false end
  end
  local found = read_entry(unpack(listed[at_entry]))
  per_entry = found.size
  return found
end
-- Return the keys of the next records in the entry. Each row can be four times as long as the last, so
-- that few rows are needed if no record can be granted.
local row_size = 1
local function read_row()
  local last = min(entry.last, nxt + max(want - got, row_size) - 1)
  row_size = 4 * row_size
  local low, high = nxt - entry.first, last - entry.first
  local row, names, numbers
  if entry.width == 1 then
    numbers = {byte(entry.numbers, low + 1, high + 1)}
  else
    numbers = {}
    local bytes = {byte(entry.numbers, 2 * low + 1, 2 * high + 2)}
    for i = 1, #bytes, 2 do numbers[#numbers + 1] = bytes[i] + 256 * (bytes[i + 1] or 0) end
  end
  row, names = {}, entry.names
  for i = 1, last - nxt + 1 do
    local k = names[(numbers[i] or -1) + 1]
    if k == nil or k == '' or type(k) ~= 'string' or #k > 256 then k = keyless end
    row[i] = k
  end
  return row
end

local pushed = {} -- by key, the line of offsets to append
-- Return the purge mark of each key in the row, or -1. A scan settles the records below the mark.
local function purge_marks(row)
  local marks_of, names = {}, {}
  for i = 1, #row do
    if row[i] ~= '' and not marks_of[row[i]] then
      marks_of[row[i]], names[#names + 1] = -1, row[i]
    end
  end
  for _, k in ipairs(names) do marks_of[k] = tonumber(call('ZSCORE', KEYS[16], k) or -1) end
  return marks_of
end
-- Return whether records of key k can be granted at once. Its entry t must be a table.
local function grantable(k, t)
  if t.line ~= '' or pushed[k] or t.held >= cap or (t.owner ~= me and t.owner ~= NOBODY) then
    return false
  end
  local x = t.extended
  return not x or (x.stop == FREE and x.suspect < nxt)
end
local function scan_row(row)
  local purged = p.purging > 0 and purge_marks(row)
  local i = 1
  while row[i] and got < want do
    local k, count = row[i], 1
    local t = entries[k]
    if purged and (purged[k] or -1) > nxt then
      p.purged = p.purged + 1
    elseif t == 0 or k == '' or (type(t) == 'number' and t < cap) then
      got = got + 1
      granted[got], offsets[got] = k, nxt
      if t then entries[k] = t + 1 end
    elseif type(t) == 'table' and grantable(k, t) then
      got = got + 1
      granted[got], offsets[got], t.owner, t.held = k, nxt, me, t.held + 1
    else
      local before, line = pushed[k], pack('<I7', nxt)
      while row[i + count] == k and not purged do -- include the next records with the same key
        line, count = line .. pack('<I7', nxt + count), count + 1
      end
      pushed[k], p.waiting = before and before .. line or line, p.waiting + count
      if before then -- this call has already told the key's owner, if necessary
      elseif type(t) ~= 'string' then
        t = as_table(k)
        local x = t.extended
        if t.line == '' and t.held < cap and t.owner ~= NOBODY and not (x and x.stop ~= FREE) then
          tell(t.owner, k)
          if t.owner == me then cut = true end -- the next step claims these records
        end
      elseif #t == 8 then
        local low, high = byte(t, 7, 8)
        if low + 256 * high < cap then tell(sub(t, 1, 6), k) end
      end
    end
    i, nxt = i + count, nxt + count
  end
end
local function append_waiting()
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
  if #long == 0 then return end
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

local scan_until = nxt + SCAN
while got < want and not (stop or cut) and nxt < scan_until and p.waiting < room and nxt < stream_end do
  if nxt > p.next and loaded > LOADS then break end
  if not entry or nxt > entry.last then entry = next_entry() end
  if not entry or entry.first > nxt then
    local to = entry and min(entry.first, stream_end) or stream_end
    if stream[3] or stream[6] then -- the store, or an unindexed part of the ring, may have the records
      stored_stop = to
      break
    end
    lose(to)
  elseif nxt <= entry.last then
    local row = read_row()
    load(row)
    scan_row(row)
  else
    break -- a hostile entry that ends before it begins
  end
end
append_waiting()
p.next = nxt
if p.purging > 0 then
  local done = call('ZRANGEBYSCORE', KEYS[16], '-inf', text(nxt), 'LIMIT', 0, 64)
  if #done > 0 then p.purging = p.purging - call('ZREM', KEYS[16], unpack(done)) end
end

-- 5. Put the granted records into batches.
local sent, fields = {}, {}
c.first, c.holding = c.last + 1, c.holding + got
for low = 1, got, BATCH do
  local high, lowest = min(low + BATCH - 1, got), offsets[low]
  for i = low + 1, high do if offsets[i] < lowest then lowest = offsets[i] end end
  c.last = c.last + 1
  local line, n = to_line(offsets, low, high), text(c.last)
  sent[#sent + 1] = line
  fields[#fields + 1], fields[#fields + 2] = n, write_batch({unpack(granted, low, high)}, line)
  marks[me .. ':' .. n] = lowest
end
if got > 0 then call('HSET', KEYS[17], unpack(fields)) end
