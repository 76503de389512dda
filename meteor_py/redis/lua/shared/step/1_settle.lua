#!lua flags=allow-oom
-- One step of a consumer in a shared group: renew its lease, settle records, and claim others.
--
-- KEYS, ARGV 1 to 3: see shared/_group.lua
-- ARGV  4 number of this step, one higher than the last; or 'number:last' after a failover has lost
--         steps. The number is then higher by a random amount, and so are the numbers of later batches.
--         If a server that still has the lost steps takes over, it cannot mistake the new ones for them.
--       5 'wait' if the consumer will wait for a wake-up if it gets no records; 'busy' if it no longer
--         waits; else ''
--       6 number of records wanted  7 batches to acknowledge: 'n,n,...'
--       8 first offset of an entry that the index lacks, '' for none; 9 and 10 its strings (see
--         records/ordering_index.py), or 'lost' and the offset after the lost records
--       11... triples: a code, a batch n or '', and offsets o of its records. 'A' n 'o,...'
--         acknowledges; these triples come first. 'R' n 'o:ms:reason' returns a failed record, delays
--         its key by ms, and states why it failed, '' if unknown. 'U' does the same without counting a
--         failure. 'X' n 'o:reason' rejects a record. 'G' n 'o': the record is gone. 'D' '' 'o': the
--         record's dead letter was published. 'L' '' 'o': the record of a dead letter was lost.
--         To keep a key's records in order, a client also returns the later records that it holds.
-- Returns {'OK', or 'AGAIN' with the same reply if this step was already done; eight numbers, eight bytes
--   each; {offsets of each batch, seven bytes each}; report; the stream's field 'large'}
--   The numbers: next offset to scan; end of the stream; number of the first batch granted; end of the
--   next records if the index lacks them but the store or the ring may have them, else 0; 1 if
--   maintenance is due, else 0; what to do if nothing was granted: 0 claim again, 1 wait for a wake-up, 2
--   wait for a wake-up or a new index entry; with 2, ms until maintenance is due (-1 without 2, or if it
--   is never due; 0 in an 'AGAIN' reply, after which the consumer must claim before it waits); epoch of
--   the stream. As one string, they cost less than as eight items of the reply.
--   A report is '' or 'failed;refused;lost;dropped'. failed: 'o:failures,...' of granted records that
--   have failed before. refused: 'o,...' not settled, because the batch no longer has them. lost:
--   'first:last,...'. dropped: 'o:failures,...' of records discarded without a dead letter
--   or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'INVALID'}: too much for one step
--   {'REPEAT', number of the consumer's last step}
--   {'FENCED', number of the consumer's last step or -1, its report}: its lease expired after that step
-- Atomic because each record is held by one consumer, waiting, or settled, and each ordering key has at
-- most one owner.

local REPLY = '<dddddddd'
local number, last = match(ARGV[4], '^(%d+):?(%d*)$')
number = tonumber(number)
last = tonumber(last) or number - 1
if number <= last then return {'INVALID'} end
local mode = ARGV[5]
local want = max(min(tonumber(ARGV[6]), 512), 0) -- limited, because other clients wait meanwhile
if number == c.step then
  local lines = {}
  for n = c.first, c.last do
    local raw = call('HGET', KEYS[17], text(n))
    lines[#lines + 1] = raw and select(2, read_batch(raw)) or ''
  end
  local idle = c.idle and (p.watcher == me and 2 or 1) or 0
  return {'AGAIN', pack(REPLY, p.next, stream_end, c.first, 0, 1, idle, 0, tonumber(stream[3])), lines,
          c.report, stream[4]}
elseif last ~= c.step then
  return {'REPEAT', c.step}
end
c.last = c.last + number - last - 1

-- Read the batches first: a step that asks for too much must change nothing.
local whole, raw_batches, size = {}, {}, 0
for n in gmatch(ARGV[7], '%d+') do whole[#whole + 1] = n end
if #whole > 512 or #ARGV > 2000 then return {'INVALID'} end
local asked = whole
if ARGV[11] then
  asked = {unpack(whole)}
  for i = 12, #ARGV, 3 do
    local n = ARGV[i]
    if n ~= '' and raw_batches[n] == nil then raw_batches[n], asked[#asked + 1] = false, n end
  end
  if #asked > 1024 then return {'INVALID'} end
end
if #asked > 0 then
  local found = call('HMGET', KEYS[17], unpack(asked))
  for i = 1, #asked do
    raw_batches[asked[i]] = found[i]
    size = size + (found[i] and byte(found[i]) or 0)
  end
end
if size > 1600 then return {'INVALID'} end

if c.deadline < p.tick + lease then
  c.deadline = p.tick + lease + floor(lease / 8)
  call('ZADD', KEYS[10], c.deadline, me)
end
if c.idle and (want > 0 or mode == 'busy') then
  c.idle = false
  call('ZREM', KEYS[11], me)
  if p.watcher == me then p.watcher = NOBODY end
  -- The consumer may already be waiting again. Wake it, because it is no longer listed as idle.
  if want == 0 then call('XADD', prefix .. 'wake:' .. me, 'MAXLEN', '=', 1, '*', 'w', 1) end
end

-- 1. Acknowledge whole batches.
local acked = {} -- the key of each record that is acknowledged
for i = 1, #whole do
  local n = whole[i]
  if raw_batches[n] then
    local names, line = read_batch(raw_batches[n])
    for j = 1, #names do acked[#acked + 1] = names[j] end
    if p.failing > 0 then
      for _, o in ipairs(from_line(line)) do healed[#healed + 1] = text(o) end
    end
    raw_batches[n], marks[me .. ':' .. n] = false, false
  end
end
if #whole > 0 then call('HDEL', KEYS[17], unpack(whole)) end

-- 2. Acknowledge some records of other batches.
local at, opened = 11, {}
if ARGV[at] then
  for i = 12, #ARGV, 3 do
    local n = ARGV[i]
    if raw_batches[n] and not opened[n] then
      local names, line = read_batch(raw_batches[n])
      local batch = {names = names, offsets = from_line(line), key = {}} -- key: the key of each offset
      for j, o in ipairs(batch.offsets) do batch.key[o] = names[j] end
      opened[n] = batch
    end
  end
  while ARGV[at] == 'A' do
    local batch = opened[ARGV[at + 1]]
    for listed in gmatch(ARGV[at + 2], '%d+') do
      local o = tonumber(listed)
      local k = batch and batch.key[o]
      if k then
        batch.key[o], acked[#acked + 1] = nil, k
        if p.failing > 0 then healed[#healed + 1] = listed end
      else
        refused[#refused + 1] = listed
      end
    end
    at = at + 3
  end
end
load(acked)
for i = 1, #acked do
  local k = acked[i]
  local t = entries[k]
  if t == 1 then
    entries[k] = 0
  elseif type(t) == 'number' then
    entries[k] = t - 1
  elseif t then -- a keyless record has no entry
    let_go(k, t, 1)
    disown(k, t)
  end
end
p.acked, c.holding = p.acked + #acked, c.holding - #acked

-- 3. Settle other records one by one.
if ARGV[at] then
  -- Library shared/_returns is inserted here.
  local back, delays, touched = {}, {}, {}
  local function settle(kind, k, o, rest)
    local t, leaves = as_table(k), true
    c.holding, touched[k] = c.holding - 1, true
    if t.held > 0 then let_go(k, t, 1) end
    if kind == 'G' then
      p.lost, healed[#healed + 1] = p.lost + 1, text(o)
    elseif kind == 'X' then
      leaves = give_up(o, k, t, rest, count_failure(o))
    else
      local delay, reason = match(rest, '^(%d*):?(.*)$')
      if reason == '' then reason = 'It failed max_deliveries times.' end
      leaves = kind == 'R' and fail(o, k, t, reason)
      delays[k] = max(delays[k] or 0, tonumber(delay) or 0)
    end
    if not leaves then
      local list = back[k] or {}
      back[k], list[#list + 1] = list, o
    end
  end
  local function settle_letter(o, counter)
    if call('ZREM', KEYS[15], o) == 0 then return end
    call('HDEL', KEYS[14], o)
    marks['letter:' .. o], healed[#healed + 1], p[counter] = false, o, p[counter] + 1
  end
  local names, settled = {}, {}
  for i = at, #ARGV - 2, 3 do
    local kind, o, rest = ARGV[i], match(ARGV[i + 2], '^(%d+):?(.*)$')
    if kind == 'D' then
      settle_letter(o, 'dead')
    elseif kind == 'L' then
      settle_letter(o, 'lost')
    elseif o then
      local batch = opened[ARGV[i + 1]]
      local k = batch and batch.key[tonumber(o)]
      if k then
        batch.key[tonumber(o)] = nil
        if k == '' then k = '\0' .. o end -- a keyless record has its own key
        names[#names + 1], settled[#settled + 1] = k, {kind, k, tonumber(o), rest}
      else
        refused[#refused + 1] = o
      end
    end
  end
  load(names)
  for i = 1, #settled do settle(unpack(settled[i])) end
  for k in pairs(touched) do
    local t = as_table(k)
    if back[k] then
      table.sort(back[k])
      put_back(k, t, back[k])
      if (delays[k] or 0) > 0 and extend(t).stop ~= PARKED then
        local due = max(p.clock + delays[k], tonumber(call('ZSCORE', KEYS[9], k) or 0))
        call('ZADD', KEYS[9], due, k)
        t.extended.stop, p.due = DELAYED, min(p.due, due)
      end
    end
    disown(k, t)
  end
end
for n, batch in pairs(opened) do
  local names, left, lowest = {}, {}, nil
  for i, o in ipairs(batch.offsets) do
    if batch.key[o] then
      names[#names + 1], left[#left + 1], lowest = batch.names[i], o, min(lowest or o, o)
    end
  end
  if #left > 0 then
    marks[me .. ':' .. n] = lowest
    call('HSET', KEYS[17], n, write_batch(names, to_line(left, 1, #left)))
  else
    marks[me .. ':' .. n] = false
    call('HDEL', KEYS[17], n)
  end
end
