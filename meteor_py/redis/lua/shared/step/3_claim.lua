-- 2. Reap a consumer whose lease has expired, and free ordering keys whose delay has ended.
if not scan_only then
  local dead = call('ZRANGEBYSCORE', KEYS[8], '-inf', format('(%.0f', now), 'LIMIT', 0, 1)[1]
  if dead and dead ~= cid then
    take_back(dead, 'Its consumer died.')
    add('reaped', 1)
  end
end
-- List ordering keys of another consumer as having more records for it.
local function offer(owner, names)
  local held, more = call('HMGET', prefix .. 'held:' .. owner, unpack(names)), {}
  for i, k in ipairs(names) do
    if count(held[i] or '') < cap then
      more[#more + 1] = head_of(k, states[k])
      more[#more + 1] = k
    end
  end
  many('ZADD', prefix .. 'more:' .. owner, more)
  woken = woken or #more > 0
end
local due = call('ZRANGEBYSCORE', KEYS[7], '-inf', format('%.0f', now), 'LIMIT', 0, 64)
load(due)
for _, k in ipairs(due) do
  local t = states[k]
  call('ZREM', KEYS[7], k)
  if t.st == 'd' then
    t.st = ''
    t.moved, dirty[k] = true, t
    if t.others and t.w > 0 then
      call('ZREM', KEYS[6], k)
      offer(t.c, {k})
    end
  end
end
place_all()

-- 3. Claim waiting records, the oldest first. The last try of a suspect is granted alone: if it kills
-- its consumer, no other record is blamed. A consumer that finds a suspect reserves its ordering key. It
-- then gets no records until it has settled those that it holds, and gets the suspect alone.
local granted, got, failed, stop = {}, 0, {}, want == 0 and not scan_only
local function grant(o, t)
  got = got + 1
  granted[got] = o
  if t.fresh then t.fresh[#t.fresh + 1] = o else t.fresh = {o} end
  t.n, t.c = t.n + 1, cid
end
local holding, passed = 0, 0
if not stop and (any_failures or alone ~= '') then
  write_held()
  holding = call('HLEN', KEYS[14]) - 1  -- without the padding field
  if alone == 'reserved' then
    alone = ''  -- unless its ordering key is still reserved, and not purged
    for _, list in ipairs(call('HVALS', KEYS[14])) do
      if list == '' then alone, holding = 'reserved', holding - 1 end
    end
  end
  if holding == 0 and alone == 'alone' then alone = '' end
  if alone ~= '' and holding > 0 then stop = true end
end

-- Put offsets back from i on.
local function leave_rest(k, t, offsets, i)
  local rest = {}
  for j = i, #offsets do rest[#rest + 1] = tonumber(offsets[j]) end
  put_back(k, t, rest)
  add('returned', -#rest)
end

local function take(k, t)
  local offsets = call('LPOP', list_of(k), min(quantum, want - got, cap - t.n))
  if not offsets then
    t.passed, passed = true, passed + 1
    return
  end
  t.w, waiting = t.w - #offsets, waiting - #offsets
  t.head, t.moved, dirty[k] = false, true, t
  local failures = any_failures and call('HMGET', KEYS[10], unpack(offsets)) or {}
  local suspects = any_suspects and call('SMISMEMBER', KEYS[16], unpack(offsets)) or {}
  for i, number in ipairs(offsets) do
    local o, times = tonumber(number), tonumber(failures[i] or 0) or 0
    local last_try = suspects[i] == 1 and tries > 0 and times >= tries - 1
    if suspects[i] == 1 and t.n > 0 then  -- only after all records that share the blame are settled
      t.passed, passed = true, passed + 1
      return leave_rest(k, t, offsets, i)
    end
    if last_try and (got > 0 or holding > 0) then
      leave_rest(k, t, offsets, i)
      if i == 1 then
        stop = true
        if alone == '' and t.n == 0 and got == 0 then
          alone, t.reserved, t.c = 'reserved', true, cid
        end
      end
      return
    end
    grant(o, t)
    if times > 0 then failed[#failed + 1] = number .. ':' .. times end
    t.reserved = false
    if last_try then
      alone, stop = 'alone', true
      return leave_rest(k, t, offsets, i + 1)
    end
    if alone == 'reserved' then alone = '' end
  end
end

while got < want and not stop do
  local mine = call('ZRANGE', KEYS[15], 0, want - got - 1 + passed, 'WITHSCORES')
  local ready = {}
  if alone == '' then ready = call('ZRANGE', KEYS[5], 0, want - got - 1, 'WITHSCORES') end
  local order, i, j = {}, 1, 1
  while mine[i] or ready[j] do
    if mine[i] and (not ready[j] or tonumber(mine[i + 1]) < tonumber(ready[j + 1])) then
      order[#order + 1], i = mine[i], i + 2
    else
      order[#order + 1], j = ready[j], j + 2
    end
  end
  load(order)
  local taken = false
  for _, k in ipairs(order) do
    if got >= want or stop then break end
    if not states[k].passed then
      taken = true
      take(k, states[k])
    end
  end
  if not taken then break end
  place_all()
end
