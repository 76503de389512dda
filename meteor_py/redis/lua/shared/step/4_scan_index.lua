-- 4. Scan new records, each once.
local stored_stop, lost = 0, {}
local function lose(to)
  lost[#lost + 1] = text(nxt) .. ':' .. text(to - 1)
  add('lost', to - nxt)
  nxt = to
  call('HSET', KEYS[3], 'lost_last', lost[#lost])
end
if ARGV[10] == 'lost' and tonumber(ARGV[9]) == nxt then lose(tonumber(ARGV[11])) end

-- The loaded index entries, from nxt on.
local entries, at_entry, per_entry = {}, 1, 4096
-- First and last offset of an entry. Publishers write the index, and one of them may be hostile: an
-- entry never reaches beyond the end of the stream, and has at least one record.
local function span(entry)
  local last, size = match(entry[1], '^(%d+)-(%d+)$')
  last = min(tonumber(last), stream_end - 1)
  return max(min(last - size + 1, last), 0), last
end
if strings > 1 then
  local size = #ARGV[11] / 2
  entries[1] = {format('%.0f-%d', ARGV[9] + size - 1, size), {unpack(ARGV, 11, 10 + strings)}}
  local first, last = span(entries[1])
  if nxt < first or nxt > last then entries = {} end
end

-- Return the ordering keys of up to 'limit' records from nxt on; {} and the end of the gap if nxt is in a
-- gap.
local function row_of(limit)
  if not entries[at_entry] then
    local wanted = min(64, floor((limit - 1) / per_entry) + 1)
    entries = call('XRANGE', KEYS[2], text(nxt) .. '-0', '+', 'COUNT', wanted)
    at_entry = 1
    if not entries[1] then return {}, stream_end end
  end
  local row, o = {}, nxt
  while entries[at_entry] and #row < limit do
    local entry = entries[at_entry][2]
    local first, last = span(entries[at_entry])
    if first > o then return row, first end
    per_entry = last - first + 1
    local size = min(last + 1 - o, limit - #row)
    local bytes, from = {string.byte(entry[1], 2 * (o - first) + 1, 2 * (o - first + size))}, #row
    for i = 1, size do
      local k = entry[(bytes[2 * i - 1] or 0) + 256 * (bytes[2 * i] or 0) + 2] or ''
      if k == '' or #k > 256 then k = free and '\0' .. text(o + i - 1) or default end
      row[from + i] = k
    end
    o = o + size
    if o > last then at_entry = at_entry + 1 end
  end
  return row
end

-- Grant the records of a row, or append them to waiting lists.
local function scan_row(row)
  local pushed, offered = {}, {}
  for i = 1, #row do
    if got >= want and not scan_only then break end
    local k = row[i]
    local t = states[k]
    if t.w == 0 and t.st == '' and (t.c == '' or (t.c == cid and t.n < cap)) and not scan_only then
      grant(nxt, t)
    else
      local list = pushed[k]
      if not list then
        list = {}
        pushed[k] = list
        if t.w == 0 then t.head, t.moved = nxt, true end
      end
      list[#list + 1] = text(nxt)
      t.w, waiting = t.w + 1, waiting + 1
      dirty[k] = t
    end
    nxt = nxt + 1
  end
  for k, list in pairs(pushed) do
    many('RPUSH', list_of(k), list)
    local t = states[k]
    if t.others and t.moved then
      t.moved = false
      if t.st ~= '' then
        call('ZADD', KEYS[6], head_of(k, t), k)
      else
        local names = offered[t.c] or {}
        names[#names + 1] = k
        offered[t.c] = names
      end
    end
  end
  for owner, names in pairs(offered) do offer(owner, names) end
end

while (got < want or scan_only) and not stop and scan > 0 and waiting < room and nxt < stream_end do
  local row, gap = row_of(min(scan_only and 256 or max(want - got, 16), 256, scan))
  load(row)
  scan_row(row)
  scan = scan - #row
  if #row == 0 then
    if m[3] then
      stored_stop = gap
      break
    end
    lose(gap)
    entries = {}
  end
end
place_all()
