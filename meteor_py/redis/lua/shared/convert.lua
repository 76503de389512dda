#!lua flags=allow-oom
-- Convert part of a shared group that a release before 0.3 wrote.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 members  4 keys  5 waiting  6 ready  7 blocked
--       8 delayed  9 leases  10 idle  11 unsettled  12 failures  13 letters  14 dying  15 purges
-- ARGV  1 incarnation of the stream  2 prefix of the group's keys, to build the names of the old keys
-- Returns {'OK', 1 if another call is needed, else 0}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because no record may be missing from both forms. A conversion may stop after any call, and
-- any client can continue it later, because each call removes what it converts from the old keys.
--
-- The old form: `state` (hash), `groups` with 'owner:waiting:state:head' for each ordering key,
-- `waiting:<key>` (list of offsets), `held:<consumer>` (key -> 'offset,...'), `suspects` (set of
-- offsets), `consumers`, `more:<consumer>`, `bell`. All other keys have the current form. The first
-- call replaces `state`, which shuts out old clients. Records that consumers hold return to the group
-- without counting as failures. The consumers must join again.

local call, text = redis.call, function(o) return string.format('%.0f', o) end
local prefix = ARGV[2]
local found = call('HGET', KEYS[1], 'incarnation')
if found ~= ARGV[1] then return {found and 'INCARNATION' or 'NOSTREAM'} end
local PORTION, PER_KEY = 500, 15 -- limit on the work of one call: an offset counts 1, a key PER_KEY
local NEAR, CHUNK = 128, 128 -- as in shared/_keys.lua
local EXTENDED, FREE, DELAYED, PARKED = '<Bc6HBdddddd', 0, 1, 2

-- 1. Settings and counters.
local state = prefix .. 'state'
if call('TYPE', state).ok == 'hash' then
  local s = call('HGETALL', state)
  local old = {}
  for i = 1, #s, 2 do old[s[i]] = s[i + 1] end
  if string.match(old.incarnation or '', '^[^.]*') ~= ARGV[1] then return {'NOGROUP'} end
  local n = function(name) return tonumber(old[name] or 0) or 0 end
  call('UNLINK', KEYS[2], KEYS[4], KEYS[5], KEYS[9])
  call('HSET', KEYS[2], 'converting', '1', 'start', old.start or '0', 'lost_last', old.lost_last or '')
  for _, name in ipairs({'incarnation', 'group_cap', 'max_deliveries', 'lease_ms', 'dead_letter',
                         'on_poison', 'default_group', 'ungrouped', 'max_waiting'}) do
    call('HSET', KEYS[2], name, old[name] or '')
  end
  call('HSET', KEYS[2], 'converted', new_progress(n('next'), n('waiting'), call('HLEN', KEYS[12]),
       n('acked'), n('dead'), n('lost'), n('purged'), n('returned'), n('reaped')))
  call('HSET', KEYS[4], '', PADDING)
  call('SET', state, NOTICE)
end
if call('HGET', KEYS[2], 'converting') ~= '1' then return {'OK', 0} end

-- 2. Ordering keys, a few at a time. A key with many records takes several calls.
local groups, budget = prefix .. 'groups', PORTION
local suspects = call('EXISTS', prefix .. 'suspects') == 1
local function add_line(key, entry, offsets)
  local line, near, far = entry.line, #entry.line / 7, {}
  for _, o in ipairs(offsets) do
    if near < NEAR and entry.far == 0 then
      line, near = line .. struct.pack('<I7', o), near + 1
    else
      far[#far + 1] = struct.pack('<I7', o)
    end
  end
  entry.line = line
  for low = 1, #far, CHUNK do
    entry.last = entry.last + 1
    local chunk = table.concat(far, '', low, math.min(low + CHUNK - 1, #far))
    call('HSET', KEYS[5], key .. ':' .. text(entry.last), chunk)
    entry.far = entry.far + #chunk / 7
  end
end
-- Move up to `count` of a key's held offsets to a sorted set, because they are stored unsorted. Return
-- how many were moved, and whether any are left.
local function sort_held(key, owner, count)
  local held, raw, set, at = prefix .. 'held:' .. owner, '', {}, 1
  if owner ~= '' then raw = call('HGET', held, key) or '' end
  while #set < 2 * count do
    local _, after, o = string.find(raw, '^,?(%d+)', at)
    if not o then break end
    set[#set + 1], set[#set + 2], at = o, o, after + 1
  end
  if #set == 0 then return 0, false end
  call('ZADD', prefix .. 'converting:' .. key, unpack(set))
  call('HSET', held, key, string.sub(raw, at))
  return #set / 2, at <= #raw
end
-- Read up to `count` waiting and held offsets of a key in the old form. Return them, oldest first; how
-- many of them were held; and whether there are more.
local function take_offsets(key, count)
  local list, sorted, all = prefix .. 'waiting:' .. key, prefix .. 'converting:' .. key, {}
  local waiting, held = call('LRANGE', list, 0, count - 1), call('ZRANGE', sorted, 0, count - 1)
  local w, h = 1, 1
  while #all < count and (waiting[w] or held[h]) do
    local a, b = tonumber(waiting[w] or 2 ^ 53), tonumber(held[h] or 2 ^ 53)
    if a < b then w = w + 1 else h = h + 1 end
    all[#all + 1] = math.min(a, b)
  end
  if w > 1 then call('LTRIM', list, w - 1, -1) end
  if h > 1 then call('ZREMRANGEBYRANK', sorted, 0, h - 2) end
  return all, h - 1, call('EXISTS', list, sorted) > 0
end
-- Remove these offsets from the suspects. Return the last one that was a suspect, or -1 if none was.
local function take_suspects(offsets)
  local names, found, last = {}, {}, -1
  if #offsets == 0 or not suspects then return last end
  for i = 1, #offsets do names[i] = text(offsets[i]) end
  for i, is in ipairs(call('SMISMEMBER', prefix .. 'suspects', unpack(names))) do
    if is == 1 then found[#found + 1], last = names[i], offsets[i] end
  end
  if #found > 0 then call('SREM', prefix .. 'suspects', unpack(found)) end
  return last
end
local function convert_key(key, value)
  local owner, stopped = string.match(value, '^(.-):%d+:(.-):')
  owner, stopped = owner or value, stopped or ''
  local sorted, unsorted = sort_held(key, owner, math.min(budget, 500))
  budget = budget - sorted - PER_KEY
  if unsorted or budget <= 0 then return end
  local raw = call('HGET', KEYS[4], key)
  local t = raw and {struct.unpack(EXTENDED, raw)} or {255, NOBODY, 0, FREE, -1, -1, -1, 0, -1, 0}
  local entry = {line = raw and string.sub(raw, t[11]) or '', last = t[9], far = t[10]}
  local all, returned, more = take_offsets(key, math.min(budget, 500))
  budget = budget - #all
  add_line(key, entry, all)
  local suspect = math.max(t[5], take_suspects(all))
  local stop = stopped == 'd' and DELAYED or stopped == 'p' and PARKED or FREE
  t[4], t[5], t[9], t[10] = stop, suspect, entry.last, entry.far
  call('HINCRBY', KEYS[2], 'returning', returned)
  if entry.line ~= '' or stop ~= FREE then
    call('HSET', KEYS[4], key, struct.pack(EXTENDED, unpack(t, 1, 10)) .. entry.line)
  end
  if more then return end
  for _, set in ipairs({KEYS[6], KEYS[7]}) do call('ZREM', set, key) end
  if entry.line ~= '' then
    local first = struct.unpack('<I7', entry.line)
    call('ZADD', stop == FREE and KEYS[6] or KEYS[7], first, key)
  end
  call('HDEL', groups, key)
  if owner ~= '' then call('HDEL', prefix .. 'held:' .. owner, key) end
end
for _ = 1, 64 do
  if budget <= 0 then break end
  local some = call('HRANDFIELD', groups, 16, 'WITHVALUES') or {}
  if #some == 0 or (#some == 2 and some[1] == '') then
    call('UNLINK', groups)
    break
  end
  for i = 1, #some, 2 do
    if budget <= 0 then break end
    if some[i] ~= '' then convert_key(some[i], some[i + 1]) end
  end
end
if call('EXISTS', groups) == 1 then return {'OK', 1} end

-- 3. Dead letters: add them to `unsettled`.
local cursor = call('HGET', KEYS[2], 'letters_cursor') or '0'
if cursor ~= 'done' then
  local scanned = call('HSCAN', KEYS[13], cursor, 'COUNT', 200)
  local marks = {}
  for i = 1, #scanned[2], 2 do
    marks[#marks + 1], marks[#marks + 2] = scanned[2][i], 'letter:' .. scanned[2][i]
  end
  for low = 1, #marks, 1000 do
    call('ZADD', KEYS[11], unpack(marks, low, math.min(low + 999, #marks)))
  end
  call('HSET', KEYS[2], 'letters_cursor', scanned[1] == '0' and 'done' or scanned[1])
  return {'OK', 1}
end

-- 4. Remove the old consumers, then finish the conversion.
local some = call('HRANDFIELD', prefix .. 'consumers', 100) or {}
if #some > 0 then
  for _, consumer in ipairs(some) do
    call('UNLINK', prefix .. 'held:' .. consumer, prefix .. 'more:' .. consumer)
  end
  call('HDEL', prefix .. 'consumers', unpack(some))
  return {'OK', 1}
end
call('UNLINK', prefix .. 'suspects', prefix .. 'bell', KEYS[9])
local progress = {struct.unpack('<ddddddddddddddddc6c6', call('HGET', KEYS[2], 'converted'))}
local returned = tonumber(call('HGET', KEYS[2], 'returning') or 0)
progress[2], progress[15] = progress[2] + returned, progress[15] + returned
call('HSET', KEYS[2], 'progress', struct.pack('<ddddddddddddddddc6c6', unpack(progress, 1, 18)))
call('HDEL', KEYS[2], 'converting', 'converted', 'returning', 'letters_cursor')
return {'OK', 0}
