-- 1. Settle.
local strings = ARGV[10] == 'lost' and 1 or tonumber(ARGV[10])
local at = 11 + strings
local acked = tonumber(ARGV[at])
local refused, healed = {}, {}
local names = {}
for i = at + 1, at + 2 * acked, 2 do names[#names + 1] = ARGV[i] end
for i = at + 2 * acked + 1, #ARGV, 3 do
  if ARGV[i] ~= 'D' then names[#names + 1] = ARGV[i + 1] end
end
load(names)
for i = at + 1, at + 2 * acked, 2 do
  local g, list = ARGV[i], ARGV[i + 1]
  local t = groups[g]
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
    if t.w > 0 then dirty[g] = t end
  end
end

for i = at + 2 * acked + 1, #ARGV, 3 do
  local op, g = ARGV[i], ARGV[i + 1]
  local number, rest = match(ARGV[i + 2], '^(%d+):?(.*)$')
  local o, t, held, found = tonumber(number), groups[g], {}, nil
  if op == 'D' then
    if call('ZREM', KEYS[11], number) == 1 then
      call('HDEL', KEYS[12], number)
      healed[#healed + 1] = number
      add('dead', 1)
    end
  else
    if t.c == cid then held = split(t.held) end
    for j, candidate in ipairs(held) do if candidate == o then found = j end end
    if not found then
      refused[#refused + 1] = number
    else
      local back = {}
      local whole = op == 'R' or op == 'U' or (op == 'X' and parks)
      if whole then
        for j = #held, found + 1, -1 do table.insert(back, 1, table.remove(held)) end
      end
      table.remove(held, found)
      local leaves = op == 'G'
      if op == 'G' then
        add('lost', 1)
        healed[#healed + 1] = number
      elseif op == 'X' then
        leaves = give_up(o, g, t, rest, call('HINCRBY', KEYS[10], number, 1))
        any_failures = true
      elseif op ~= 'U' then
        leaves = fail(o, g, t, 'It was delivered as often as it may be.')
      end
      if not leaves then table.insert(back, 1, o) end
      put_back(g, t, back)
      if whole and t.st == '' and #back > 0 and tonumber(rest) and tonumber(rest) > 0 then
        t.st, woken = 'd', true  -- others shall know when to come
        call('ZADD', KEYS[7], now + rest, g)
      end
      t.n, t.held = #held, join(held)
      disown(t)
      dirty[g] = t
    end
  end
end
many('HDEL', KEYS[10], healed)
if any_suspects then many('SREM', KEYS[16], healed) end
if ARGV[5] == 'leave' then
  write_held()
  take_back(cid)
  want = 0
end
