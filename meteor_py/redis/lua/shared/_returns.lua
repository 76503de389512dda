-- Library for shared/step and shared/maintain: records that are returned, and records that fail.

local on_failure = call('HMGET', KEYS[3], 'max_deliveries', 'dead_letter', 'on_poison')
local tries, letters, parks = tonumber(on_failure[1]), on_failure[2] ~= '', on_failure[3] == 'park'

-- Lines can be long, so these functions cut and join strings instead of unpacking every offset.

-- Return the position, at or after `low`, of the first offset in a line that is higher than `o`.
local function find_above(line, o, low)
  local high = #line + 1
  while low < high do
    local middle = low + 7 * floor((high - low) / 14)
    if unpack_struct('<I7', line, middle) > o then high = middle else low = middle + 7 end
  end
  return low
end
local function insert(line, offsets)
  local parts, from = {}, 1
  for i = 1, #offsets do
    local at = find_above(line, offsets[i], from)
    parts[#parts + 1], parts[#parts + 2] = sub(line, from, at - 1), pack('<I7', offsets[i])
    from = at
  end
  return concat(parts) .. sub(line, from)
end
-- Move chunks into the entry until it has all waiting offsets up to `o`. There are only a few such
-- offsets: each was held together with `o`, and has been returned since.
local function pull_chunks(k, t, o)
  local x, parts, fields = t.extended, {t.line}, {}
  while x and x.far > 0 do
    local field = k .. ':' .. text(x.first)
    local chunk = call('HGET', KEYS[6], field) or ''
    if chunk ~= '' and unpack_struct('<I7', chunk) > o then break end
    parts[#parts + 1], fields[#fields + 1] = chunk, field
    x.first, x.far = x.first + 1, x.far - #chunk / 7
    if x.first > x.last then x.far = 0 end
  end
  many('HDEL', KEYS[6], fields)
  t.line = concat(parts)
end
-- Set the line of an entry. If the line is long, move its end to chunks.
local function set_line(k, t, line)
  t.line = line
  if #line <= 7 * (2 * NEAR + CHUNK) then return end
  local x, set, high = extend(t), {}, #line
  if x.far == 0 then x.last = x.first - 1 end
  while high > 7 * NEAR do
    local low = max(high - 7 * CHUNK, 7 * NEAR)
    x.first, x.far = x.first - 1, x.far + (high - low) / 7
    set[#set + 1], set[#set + 2] = k .. ':' .. text(x.first), sub(line, low + 1, high)
    high = low
  end
  many('HSET', KEYS[6], set)
  t.line = sub(line, 1, 7 * NEAR)
end
-- Return whether an offset is waiting.
local function is_waiting(k, t, o)
  pull_chunks(k, t, o)
  local at = find_above(t.line, o, 1) - 7
  local found = at > 0 and unpack_struct('<I7', t.line, at) == o
  set_line(k, t, t.line)
  return found
end
-- Remove a waiting offset.
local function take_out(k, t, o)
  pull_chunks(k, t, o)
  local at = find_above(t.line, o, 1) -- the position after `o`
  set_line(k, t, sub(t.line, 1, at - 8) .. sub(t.line, at))
  p.waiting = p.waiting - 1
  if t.line == '' and t.extended and t.extended.far > 0 then pull_chunk(k, t) end
end
-- Insert returned offsets, which are in ascending order, among the waiting ones.
local function put_back(k, t, offsets)
  pull_chunks(k, t, offsets[#offsets])
  set_line(k, t, insert(t.line, offsets))
  p.waiting, p.returned = p.waiting + #offsets, p.returned + #offsets
  if t.held > 0 and not (t.extended and t.extended.stop ~= FREE) then
    extend(t).stop = BEHIND
    tell(t.owner, k)
  end
end
-- Give up on a record; return whether to remove the record from its key.
local function give_up(o, k, t, reason, failures)
  if parks then
    if extend(t).stop == DELAYED then call('ZREM', KEYS[9], k) end
    t.extended.stop = PARKED
  end
  if letters then
    call('HSET', KEYS[14], text(o), format('%d:%d:', failures, #k) .. k .. reason)
    call('ZADD', KEYS[15], 0, text(o))
    marks['letter:' .. text(o)], p.due = o, 0
    return true
  end
  if parks then return false end
  healed[#healed + 1], dropped[#dropped + 1] = text(o), text(o) .. ':' .. failures
  p.dead = p.dead + 1
  return true
end
local function count_failure(o)
  local failures = call('HINCRBY', KEYS[13], text(o), 1)
  if failures == 1 then p.failing = p.failing + 1 end
  return failures
end
local function fail(o, k, t, reason)
  local failures = count_failure(o)
  return tries > 0 and failures >= tries and give_up(o, k, t, reason, failures)
end
