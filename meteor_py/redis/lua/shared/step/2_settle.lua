-- 1. Settle.
local strings = ARGV[10] == 'lost' and 1 or tonumber(ARGV[10])
local at = 11 + strings
local acked = tonumber(ARGV[at])
local refused, healed = {}, {}
local names = {}
for i = at + 1, at + 2 * acked, 2 do names[#names + 1] = ARGV[i] end
for i = at + 2 * acked + 1, #ARGV, 3 do
  if ARGV[i + 1] ~= '' then names[#names + 1] = ARGV[i + 1] end
end
load(names)
for i = at + 1, at + 2 * acked, 2 do
  local k, list = ARGV[i], ARGV[i + 1]
  local t = states[k]
  if t.c == cid and t.held == list then
    add('acked', t.n)
    if any_failures or any_suspects then
      for o in gmatch(list, '%d+') do healed[#healed + 1] = o end
    end
    t.held, t.n = '', 0
  else
    local done, left = {}, {}
    for o in gmatch(list, '%d+') do done[tonumber(o)] = o end
    for _, o in ipairs(t.c == cid and split(t.held) or {}) do
      if done[o] then
        healed[#healed + 1] = done[o]
        done[o] = nil
        add('acked', 1)
      else
        left[#left + 1] = o
      end
    end
    for _, o in pairs(done) do refused[#refused + 1] = o end
    if t.c == cid then t.n, t.held = #left, join(left) end
  end
  if t.c == cid then
    disown(t)
    if t.w > 0 then dirty[k] = t end
  end
end

-- Collect the settlements of each ordering key, and write the key once.
local works = {}
local function work_on(k, t)
  local work = {offsets = t.c == cid and split(t.held) or {}, has = {}, back = {}, delay = 0}
  for _, o in ipairs(work.offsets) do work.has[o] = true end
  work.last = #work.offsets
  works[k] = work
  return work
end
local function settle(op, k, number, rest)
  local o, t = tonumber(number), states[k]
  local work = works[k] or work_on(k, t)
  if not work.has[o] then
    refused[#refused + 1] = number
    return
  end
  local back = work.back
  if op == 'R' or op == 'U' or (op == 'X' and parks) then
    while work.last > 0 and work.offsets[work.last] > o do  -- later records go back with it
      local behind = work.offsets[work.last]
      if work.has[behind] then
        work.has[behind] = nil
        back[#back + 1] = behind
      end
      work.last = work.last - 1
    end
    if op ~= 'X' then work.delay = max(work.delay, tonumber(rest) or 0) end
  end
  work.has[o] = nil
  local leaves = op == 'G'
  if op == 'G' then
    add('lost', 1)
    healed[#healed + 1] = number
  elseif op == 'X' then
    leaves = give_up(o, k, t, rest, call('HINCRBY', KEYS[10], number, 1))
    any_failures = true
  elseif op ~= 'U' then
    leaves = fail(o, k, t, 'It failed max_deliveries times.')
  end
  if not leaves then back[#back + 1] = o end
end
local function settle_letter(number, counter)
  if call('ZREM', KEYS[11], number) == 0 then return end
  call('HDEL', KEYS[12], number)
  healed[#healed + 1] = number
  add(counter, 1)
end
for i = at + 2 * acked + 1, #ARGV, 3 do
  local number, rest = match(ARGV[i + 2], '^(%d+):?(.*)$')
  if ARGV[i] == 'D' then
    settle_letter(number, 'dead')
  elseif ARGV[i] == 'L' then
    settle_letter(number, 'lost')
  else
    settle(ARGV[i], ARGV[i + 1], number, rest)
  end
end
for k, work in pairs(works) do
  local t, left = states[k], {}
  if t.c == cid then
    for _, o in ipairs(work.offsets) do if work.has[o] then left[#left + 1] = o end end
    t.n, t.held = #left, join(left)
    table.sort(work.back)
    put_back(k, t, work.back)
    if work.delay > 0 and #work.back > 0 and t.st ~= 'p' then
      t.st, woken = 'd', true  -- others must learn when the delay ends
      call('ZADD', KEYS[7], max(now + work.delay, call('ZSCORE', KEYS[7], k) or 0), k)
    end
    disown(t)
    dirty[k] = t
  end
end
many('HDEL', KEYS[10], healed)
if any_suspects then many('SREM', KEYS[16], healed) end
if ARGV[5] == 'leave' then
  write_held()
  take_back(cid)
  want = 0
end
