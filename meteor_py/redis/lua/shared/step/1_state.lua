#!lua flags=allow-oom
-- One step of a consumer of a shared group: renew its lease, settle, reap a dead consumer, claim.
--
-- KEYS  1 meta  2 index  3 state  4 groups  5 ready  6 blocked  7 delayed  8 leases  9 consumers
--       10 failures  11 dying  12 letters  13 bell  14 held, and 15 more, of this consumer
--       16 suspects
-- ARGV  1 prefix of the shared group's keys, from which those of other consumers and the waiting lists
--         are made
--       2 incarnation of stream and group  3 consumer, '' to only scan
--       4 number of this step, one above the last
--       5 'leave', 'wake' to ring the bell if this consumer may claim more, else ''  6 records wanted
--       7 most records to scan  8 most records to take of one ordering key at a time
--       9 first offset of an entry that the index has dropped, '' for none
--       10 number of strings of that entry, or 'lost' if neither ring nor store has it: then 11 is the
--       offset after the lost records, else 11... are the strings
--       then n, and n times an ordering key and its acknowledged offsets: 'o,o,...'
--       then triples: 'R' key 'o:ms' rewinds the key to o, counts a failure, and delays the key by ms;
--       'U' the same without a failure; 'Q' key 'o' returns only o and counts a failure; 'X' key
--       'o:reason' rejects; 'G' key 'o': the record is gone; 'D' '' 'o': its dead letter is published;
--       'L' '' 'o': the record of a dead letter is lost
-- Returns {'OK', next offset to scan, end of the stream, records waiting, bell, ms until records may
--     become available, first granted offset, distances of all granted offsets from it; 'o:failures,...'
--     of those that failed before; end of the records that only the store has, 0 if the index has them;
--     refused: 'o,...'; lost: 'first:last,...'; dropped: 'o:failures,...'; {offset, details, ...} of
--     dead letters to publish; epoch of the stream}
--   or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'FENCED'}: its lease has expired
--   {'REPEAT', number of the last step}: this step is not the one after it
-- Atomic because each record is held by one consumer, waiting, or settled, and each ordering key has at
-- most one owner.
--
-- An ordering key is free, or owned by the consumer that holds records of it. Nothing else is assigned.
-- Each index entry is scanned once: a record is granted right there, or its offset joins the waiting
-- list of its ordering key. Three sets list keys with waiting records by the offset of their head:
-- 'ready' (free keys), 'more' (keys of a consumer that may claim more) and 'blocked' (delayed or parked).

local call, format, floor, min, max = redis.call, string.format, math.floor, math.min, math.max
local find, match, gmatch, sub = string.find, string.match, string.gmatch, string.sub
local prefix, cid, scan_only = ARGV[1], ARGV[3], ARGV[3] == ''

local m = call('HMGET', KEYS[1], 'incarnation', 'next', 'store', 'epoch')
if m[1] ~= match(ARGV[2], '^[^.]*') then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
local s = call('HMGET', KEYS[3], 'incarnation', 'next', 'group_cap', 'max_deliveries', 'lease_ms',
               'dead_letter', 'on_poison', 'default_group', 'ungrouped', 'max_waiting', 'waiting',
               'bell', 'last')
if s[1] ~= ARGV[2] and match(s[1] or '', '^[^.]*') ~= ARGV[2] then return {'NOGROUP'} end
local nxt, cap, tries, lease = tonumber(s[2]), tonumber(s[3]), tonumber(s[4]), tonumber(s[5])
local letters, parks, default, free = s[6] ~= '', s[7] == 'park', s[8], s[9] == 'free'
local room, waiting, bell = tonumber(s[10]), tonumber(s[11]), tonumber(s[12])
local stream_end, nxt0, waiting0 = tonumber(m[2]), nxt, waiting
-- Bounded here, not by the caller: all other clients wait for the script.
local want, scan = min(tonumber(ARGV[6]), 10000), min(tonumber(ARGV[7]), 4096)
local quantum = tonumber(ARGV[8])

local step, alone, name = nil, '', ''
if not scan_only then
  step, alone, name = match(call('HGET', KEYS[9], cid) or '', '^(%d+):(.-):(.*)$')
  if not step then return {'FENCED'} end
  if tonumber(ARGV[4]) ~= step + 1 then return {'REPEAT', tonumber(step)} end
end
local clock = call('TIME')
local now = clock[1] * 1000 + floor(clock[2] / 1000)
if not scan_only then
  -- If no consumer took a step for a long time, the server was down or its clock was set: shift all
  -- leases by that gap.
  local gap = now - (tonumber(s[13] or nil) or now)
  if math.abs(gap) > lease / 2 then
    local leases = call('ZRANGE', KEYS[8], 0, -1, 'WITHSCORES')
    for i = 1, #leases, 2 do call('ZADD', KEYS[8], leases[i + 1] + gap, leases[i]) end
  end
  call('ZADD', KEYS[8], now + lease, cid)
end

-- Lua writes numbers with 14 digits, and offsets may have 16.
local function text(o) return o < 1e14 and o or format('%.0f', o) end
local function join(offsets)
  local last = offsets[#offsets]
  if last and last >= 1e14 then
    for i, o in ipairs(offsets) do offsets[i] = format('%.0f', o) end
  end
  return table.concat(offsets, ',')
end
local function split(list)
  local offsets = {}
  for o in gmatch(list, '%d+') do offsets[#offsets + 1] = tonumber(o) end
  return offsets
end
local function count(list)
  if list == '' then return 0 end
  if not find(list, ',', 1, true) then return 1 end
  local _, commas = string.gsub(list, ',', '')
  return commas + 1
end
local function many(command, key, arguments)
  for low = 1, #arguments, 1000 do
    call(command, key, unpack(arguments, low, min(low + 999, #arguments)))
  end
end

local counters = {}
local function add(counter, n) counters[counter] = (counters[counter] or 0) + n end

-- Ordering keys: 'owner[:waiting:state:head]' in the hash. Here: c owner, w waiting, st state ('d'
-- delayed, 'p' parked), head first waiting offset if known, raw as read, at the set that lists it. If
-- this consumer owns it also: held as a string, known as read, n number held, fresh granted now.
local states, dirty = {}, {}
local sets = {r = KEYS[5], b = KEYS[6], m = KEYS[15]}

local function place_of(t)
  if t.w == 0 then return false end
  if t.st ~= '' then return 'b' end
  if t.c == '' then return 'r' end
  return t.n < cap and 'm'
end

local function read(raw)
  local c, w, st, head = raw or '', 0, '', false
  if raw and find(raw, ':', 1, true) then
    c, w, st, head = match(raw, '^(.-):(%d+):(.-):(%d*)$')
    w, head = tonumber(w), tonumber(head) or false
  end
  -- All fields at once: a growing table is reallocated.
  return {c = c, w = w, st = st, head = head, raw = raw, n = 0, held = '', known = false,
          fresh = false, at = false, moved = false, reserved = false, passed = false,
          others = false}
end

local function load(names)
  local asked, mine = {}, {}
  for i = 1, #names do
    local k = names[i]
    if not states[k] then
      states[k] = true
      asked[#asked + 1] = k
    end
  end
  for low = 1, #asked, 1000 do
    local high = min(low + 999, #asked)
    local values = call('HMGET', KEYS[4], unpack(asked, low, high))
    for i = low, high do
      local t = read(values[i - low + 1])
      states[asked[i]] = t
      if t.c == '' then
        if t.w > 0 then t.at = place_of(t) end
      elseif t.c == cid then
        mine[#mine + 1] = asked[i]
      else
        t.others = true
      end
    end
  end
  for low = 1, #mine, 1000 do
    local high = min(low + 999, #mine)
    local values = call('HMGET', KEYS[14], unpack(mine, low, high))
    for i = low, high do
      local t, held = states[mine[i]], values[i - low + 1]
      t.held, t.known, t.reserved = held or '', held, held == ''
      t.n = count(t.held)
      if t.w > 0 then t.at = place_of(t) end
    end
  end
end

local function disown(t)
  if t.n == 0 and not t.reserved then t.c = '' end
end

local function list_of(k) return prefix .. 'waiting:' .. k end

local function head_of(k, t)
  if not t.head then t.head = tonumber(call('LINDEX', list_of(k), 0)) end
  return text(t.head)
end

-- Update the sets of the keys that have changed.
local woken, freed = false, false  -- whether others have work: certainly; unless claimed here
local function place_all()
  local out, into = {r = {}, b = {}, m = {}}, {r = {}, b = {}, m = {}}
  for k, t in pairs(dirty) do
    if not t.others then
      local at = place_of(t)
      if t.at and t.at ~= at then local list = out[t.at]; list[#list + 1] = k end
      if at and (at ~= t.at or t.moved) then
        local list = into[at]
        list[#list + 1] = head_of(k, t)
        list[#list + 1] = k
        if at == 'r' then freed = true end
      end
      t.at, t.moved = at, false
    end
  end
  dirty = {}
  for set, key in pairs(sets) do
    many('ZREM', key, out[set])
    many('ZADD', key, into[set])
  end
end

-- Write the records that this consumer holds into its hash.
local function write_held()
  local set, gone = {}, {}
  for k, t in pairs(states) do
    if t.fresh then
      local list = join(t.fresh)
      if t.held ~= '' then
        local unsorted = tonumber(match(t.held, '(%d+)$')) > tonumber(t.fresh[1])
        list = t.held .. ',' .. list
        if unsorted then  -- one of them was returned alone before
          local offsets = split(list)
          table.sort(offsets)
          list = join(offsets)
        end
      end
      t.held, t.fresh = list, false
    end
    local here = t.c == cid and (t.n > 0 or t.reserved)
    if here and t.held ~= t.known then
      set[#set + 1] = k
      set[#set + 1] = t.held
      t.known = t.held
    elseif not here and t.known then
      gone[#gone + 1] = k
      t.known = false
    end
  end
  many('HSET', KEYS[14], set)
  many('HDEL', KEYS[14], gone)
end

-- Put ascending offsets back into their places in the waiting list of their ordering key.
local function put_back(k, t, offsets)
  if #offsets == 0 then return end
  local key, last, all = list_of(k), offsets[#offsets], {}
  while t.w > #all do  -- only records returned before have lower offsets
    local heads = call('LRANGE', key, #all, #all + 255)
    for _, head in ipairs(heads) do
      if tonumber(head) > last then break end
      all[#all + 1] = tonumber(head)
    end
    if tonumber(heads[#heads]) > last then break end
  end
  if #all > 0 then
    call('LPOP', key, #all)
    t.w, waiting = t.w - #all, waiting - #all
  end
  for _, o in ipairs(offsets) do all[#all + 1] = o end
  table.sort(all)
  t.head, t.moved = all[1], true
  t.w, waiting = t.w + #all, waiting + #all
  local turned = {}
  for i = #all, 1, -1 do turned[#turned + 1] = text(all[i]) end
  many('LPUSH', key, turned)
  add('returned', #offsets)
end

local any_failures = call('EXISTS', KEYS[10]) == 1
local any_suspects = call('EXISTS', KEYS[16]) == 1
local dropped = {}
local function give_up(o, k, t, reason, failures)  -- returns whether it leaves its key
  if parks then t.st = 'p' end
  if letters then
    call('HSET', KEYS[12], text(o), format('%d:%d:', failures, #k) .. k .. reason)
    call('ZADD', KEYS[11], 0, text(o))
    return true
  end
  if parks then return false end
  call('HDEL', KEYS[10], text(o))
  call('SREM', KEYS[16], text(o))
  dropped[#dropped + 1] = text(o) .. ':' .. failures
  add('dead', 1)
  return true
end
local function fail(o, k, t, reason)
  local failures = call('HINCRBY', KEYS[10], text(o), 1)
  any_failures = true
  return tries > 0 and failures >= tries and give_up(o, k, t, reason, failures)
end

local function take_back(owner, reason)
  local held = call('HGETALL', prefix .. 'held:' .. owner)
  local names = {}
  for i = 1, #held, 2 do if held[i] ~= '' then names[#names + 1] = held[i] end end
  load(names)
  local by_key = {}
  for i = 1, #held, 2 do by_key[held[i]] = held[i + 1] end
  for _, k in ipairs(names) do
    local t, offsets, suspects = states[k], split(by_key[k]), {}
    t.c, t.n, t.held, t.known, t.reserved, t.others = '', 0, '', false, false, false
    t.at = t.w > 0 and t.st ~= '' and 'b'
    if reason and offsets[1] then
      -- The consumer may have processed records without acknowledging them, so any of these may
      -- have killed it: from now on they are granted one at a time.
      local number = text(offsets[1])
      local suspected = call('SISMEMBER', KEYS[16], number) == 1
      for i, o in ipairs(offsets) do suspects[i] = text(o) end
      many('SADD', KEYS[16], suspects)
      any_suspects = true
      -- A consumer's death must not make a record a dead letter before the record was granted
      -- alone.
      if suspected or (tonumber(call('HGET', KEYS[10], number) or 0) or 0) + 1 ~= tries then
        if fail(offsets[1], k, t, reason) then table.remove(offsets, 1) end
      end
    end
    put_back(k, t, offsets)
    t.moved, dirty[k] = true, t
  end
  call('DEL', prefix .. 'held:' .. owner, prefix .. 'more:' .. owner)
  call('ZREM', KEYS[8], owner)
  call('HDEL', KEYS[9], owner)
end
