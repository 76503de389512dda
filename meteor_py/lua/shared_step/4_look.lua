-- 4. Then look at new records, each once.
local cold, lost = 0, {}
local function lose(to)
  lost[#lost + 1] = text(nxt) .. ':' .. text(to - 1)
  add('lost', to - nxt)
  nxt = to
  call('HSET', KEYS[3], 'lost_last', lost[#lost])
end
if ARGV[10] == 'lost' and tonumber(ARGV[9]) == nxt then lose(tonumber(ARGV[11])) end
local given = strings > 1 and {text(tonumber(ARGV[9])), {unpack(ARGV, 11, 10 + strings)}}

local function look_at(first, last, entry)  -- from nxt on
  local numbers, pushed = entry[1], {}
  while nxt <= last and scan > 0 and waiting < room and (got < want or looking) do
    local size = min(last + 1 - nxt, scan, 128)
    if not looking then size = min(size, max(want - got, 16)) end
    local from = 2 * (nxt - first)
    local bytes = {string.byte(numbers, from + 1, from + 2 * size)}
    local row = {}
    for i = 1, size do
      local g = entry[bytes[2 * i - 1] + 256 * bytes[2 * i] + 2]
      if g == '' then g = free and '\0' .. text(nxt + i - 1) or default end
      row[i] = g
    end
    load(row)
    for i = 1, size do
      if not looking and got >= want then break end
      local g = row[i]
      local t = groups[g]
      if not looking and t.w == 0 and t.st == '' and (t.c == '' or (t.c == cid and t.n < cap)) then
        grant(nxt, t)
      else
        local list = pushed[g]
        if not list then
          list = {}
          pushed[g] = list
          if t.w == 0 then t.head, t.moved = nxt, true end
        end
        list[#list + 1] = text(nxt)
        t.w, waiting = t.w + 1, waiting + 1
        dirty[g] = t
      end
      nxt, scan = nxt + 1, scan - 1
    end
  end
  for g, list in pairs(pushed) do
    many('RPUSH', list_of(g), list)
    local t = groups[g]
    if t.others and t.moved then
      t.moved = false
      if t.st ~= '' then
        call('ZADD', KEYS[6], t.head, g)
      elseif count(call('HGET', prefix .. 'held:' .. t.c, g) or '') < cap then
        call('ZADD', prefix .. 'more:' .. t.c, t.head, g)
        woken = true
      end
    end
  end
end

local entries_wanted = 1
while (got < want or looking) and not stop and scan > 0 and waiting < room and nxt < stream_end do
  local entries
  if given and nxt >= tonumber(given[1]) and nxt < given[1] + #given[2][1] / 2 then
    entries = {{format('%.0f-%d', given[1] + #given[2][1] / 2 - 1, #given[2][1] / 2), given[2]}}
  else
    entries = call('XRANGE', KEYS[2], text(nxt) .. '-0', '+', 'COUNT', entries_wanted)
  end
  if #entries == 0 then entries = {{format('%.0f-0', stream_end - 1), {}}} end
  for _, entry in ipairs(entries) do
    local last, size = match(entry[1], '^(%d+)-(%d+)$')
    last, size = tonumber(last), tonumber(size)
    local first = last - size + 1
    if first > nxt then
      if m[3] then
        cold = first
        break
      end
      lose(first)
    end
    if size > 0 then look_at(first, last, entry[2]) end
    if nxt <= last or got >= want and not looking then break end
    entries_wanted = max(1, min(64, floor((looking and scan or want - got) / size)))
  end
  if cold > 0 then break end
end
place_all()
