-- 4. Claim waiting records, the oldest first. A suspect is a record that may have killed a consumer.
-- For its last delivery attempt, a suspect is granted alone, so that no other record is blamed if it
-- kills its consumer. If such a suspect is next and the consumer holds other records, the consumer
-- reserves the suspect's key. It then gets no more records until it has settled all that it holds.
local QUANTUM, ROUND = 16, 64 -- records to take from one key in the first turn; keys in one round
local ROUNDS = 16
local got, granted, offsets, cut = 0, {}, {}, false
if c.alone and c.holding == 0 then c.alone = false end
local stop = c.alone or (c.kept ~= '' and c.holding > 0)
local waits = call('ZCARD', KEYS[11])

-- The keys that may have waiting records for this consumer. LPOP removes keys, so it must not run
-- before the reserved key is tried, which may stop the claim.
local mine, ready = false, {}
if want > 0 and not stop and c.kept == '' then
  mine, ready = call('LPOP', KEYS[18], ROUND), call('ZRANGE', KEYS[7], 0, min(want, ROUND) - 1)
end
if want > 0 and not stop and (c.kept ~= '' or mine or ready[1] or freed[1] or told[me]) then
  local left = {} -- keys from which this consumer may claim more records

  -- Return whether a suspect may be granted now. If this is its last delivery attempt, set `stop`.
  local function may_try(k, t, o)
    if t.held > 0 then return false end -- the key's held records must be settled first
    local tries = tonumber(call('HGET', KEYS[3], 'max_deliveries'))
    if tries > 0 and tonumber(call('HGET', KEYS[13], text(o)) or 0) >= tries - 1 then
      stop = true
      if got > 0 or c.holding > 0 then
        c.kept, t.owner = k, me
        if t.extended.stop == FREE then t.extended.stop = BEHIND end
        return false
      end
      c.alone = true
    end
    return true
  end
  local function note_failures(low, high)
    local numbers = {}
    for i = low, high do numbers[#numbers + 1] = text(offsets[i]) end
    local times = call('HMGET', KEYS[13], unpack(numbers))
    for i = 1, #numbers do
      if times[i] then failed[#failed + 1] = numbers[i] .. ':' .. times[i] end
    end
  end
  local function take(k, limit)
    local t = entries[k]
    local x, count = t.extended, min(limit, want - got, cap - t.held, #t.line / 7)
    if count <= 0 then return end
    local o = unpack_struct('<I7', t.line)
    if x and x.suspect >= o then
      left[k] = t.held > 0 or nil
      if not may_try(k, t, o) then return end
      count = 1
    elseif x and x.suspect >= 0 and t.held == 0 then
      x.suspect = -1
    end
    local first = got + 1
    got = got + count
    granted[first], offsets[first] = k, o
    if count > 1 then
      local more = {unpack_struct('<' .. rep('I7', count), t.line)}
      for i = 2, count do granted[first + i - 1], offsets[first + i - 1] = k, more[i] end
    end
    if p.failing > 0 then note_failures(first, got) end
    t.line, t.owner, t.held = sub(t.line, 7 * count + 1), me, t.held + count
    p.waiting = p.waiting - count
    if x and t.line == '' then
      if x.far > 0 then pull_chunk(k, t) elseif x.stop == BEHIND then x.stop = FREE end
    end
    if k == c.kept then c.kept = '' end
    if t.line ~= '' and t.held < cap then left[k] = true elseif left[k] then left[k] = nil end
  end
  local function claimable(t)
    if type(t) ~= 'table' or t.line == '' then return false end
    local x = t.extended
    return (t.owner == NOBODY or (t.owner == me and t.held < cap))
      and not (x and (x.stop == DELAYED or x.stop == PARKED))
  end
  local function by_age(names)
    local heads, of_head = {}, {}
    for i = 1, #names do
      heads[i] = unpack_struct('<I7', entries[names[i]].line)
      of_head[heads[i]] = names[i]
    end
    table.sort(heads)
    for i = 1, #heads do names[i] = of_head[heads[i]] end
  end

  if c.kept ~= '' then
    local k = c.kept
    load({k})
    c.kept = ''
    if claimable(entries[k]) then
      take(k, 1)
    else
      disown(k, as_table(k))
    end
    ready = nil
  end

  -- If other consumers are idle, a consumer that holds other records leaves them the keys that it has
  -- just freed. A consumer that holds none leaves them every second key.
  local candidates, spared = {}, {}
  for i = 1, #freed do
    if waits == 0 or (c.holding == 0 and i % 2 == 1) then
      candidates[#candidates + 1] = freed[i]
    else
      spared[freed[i]] = true
    end
  end
  local rounds = 0
  while got < want and not stop do
    cut = rounds > 0 and (loaded > LOADS or rounds == ROUNDS)
    if cut then break end
    rounds = rounds + 1
    if not ready then
      mine = call('LPOP', KEYS[18], ROUND)
      ready = call('ZRANGE', KEYS[7], 0, min(want - got, ROUND) - 1)
    end
    local before, names, seen, total = got, {}, {}, 0
    local told_now = told[me] or {} -- keys that this step would list in `more`
    told[me] = nil
    mine = mine or {}
    load(mine)
    load(ready)
    for _, list in ipairs({mine, told_now, ready, candidates}) do
      for i = 1, #list do
        local k = list[i]
        if not (seen[k] or spared[k]) and claimable(entries[k]) then
          seen[k], names[#names + 1], total = true, k, total + #entries[k].line
        end
      end
    end
    candidates, ready = {}, nil
    if total > 7 * (want - got) then by_age(names) end -- more records wait than are wanted
    for _, limit in ipairs({QUANTUM, cap}) do
      for i = 1, #names do
        local k = names[i]
        if got < want and not stop then
          if limit == QUANTUM or (entries[k].line ~= '' and claimable(entries[k])) then
            take(k, limit)
          end
        elseif entries[k].owner == me and claimable(entries[k]) then
          left[k] = true
        end
      end
    end
    if got == before and #mine < ROUND then break end
  end
  for k in pairs(left) do tell(me, k) end
end
