#!lua flags=allow-oom
-- Convert a shared group that a release before 0.3 wrote, a portion per call.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 members  4 keys  5 waiting  6 ready  7 blocked
--       8 delayed  9 leases  10 idle  11 unsettled  12 failures  13 letters  14 dying  15 purges
-- ARGV  1 incarnation of the stream  2 prefix of the group's keys, from which the old ones are made
-- Returns {'OK', 1 if another call is needed, else 0}, or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because no record may be missing from both forms. The calls may stop at any point and continue
-- later, in any client: what is converted leaves the old keys in the same call.
--
-- The old form: `state` (hash), `groups` with 'owner:waiting:state:head' for each ordering key,
-- `waiting:<key>` (list of offsets), `held:<consumer>` (key -> 'offset,...'), `suspects` (set of
-- offsets), `consumers`, `more:<consumer>`, `bell`. The other keys have the same form as now. The first
-- call replaces `state`, which shuts out old clients. What consumers hold is returned without counting a
-- failure; they join again.

local call, text = redis.call, function(o) return string.format('%.0f', o) end
local prefix = ARGV[2]
local found = call('HGET', KEYS[1], 'incarnation')
if found ~= ARGV[1] then return {found and 'INCARNATION' or 'NOSTREAM'} end
local PORTION, NEAR, CHUNK = 1000, 128, 128 -- offsets in a call, and as in shared/_keys.lua
local EXTENDED, FREE, DELAYED, PARKED = '<Bc6HBdddddd', 0, 1, 2

-- 1. Settings and counters.
local state = prefix .. 'state'
if call('TYPE', state).ok == 'hash' then
  local s = call('HGETALL', state)
  local old = {}
  for i = 1, #s, 2 do old[s[i]] = s[i + 1] end
  if string.match(old.incarnation or '', '^[^.]*') ~= ARGV[1] then return {'NOGROUP'} end
  local n = function(name) return tonumber(old[name] or 0) or 0 end
  call('DEL', KEYS[2], KEYS[4], KEYS[5], KEYS[9])
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

-- 2. Ordering keys, a few at a time; a long one takes several calls.
local groups, budget = prefix .. 'groups', PORTION
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
-- The offsets of a key in the old form, oldest first, at most `count`: waiting and held ones.
local function take_offsets(key, owner, count)
  local list, held, all = prefix .. 'waiting:' .. key, prefix .. 'held:' .. owner, {}
  for _, o in ipairs(call('LRANGE', list, 0, count - 1)) do all[#all + 1] = tonumber(o) end
  local waiting, raw = all[#all] or 2 ^ 53, owner ~= '' and call('HGET', held, key) or ''
  local some, rest = {}, {}
  for o in string.gmatch(raw, '%d+') do
    -- A held record behind the waiting ones that were read must wait for its turn.
    if tonumber(o) <= waiting or #all < count then some[#some + 1] = tonumber(o) else rest[#rest + 1] = o end
  end
  if #all > 0 then call('LTRIM', list, #all, -1) end
  for _, o in ipairs(some) do all[#all + 1] = o end
  table.sort(all)
  if raw ~= '' then call('HSET', held, key, table.concat(rest, ',')) end
  return all, #some, #rest > 0 or call('EXISTS', list) == 1
end
local function convert_key(key, value)
  local owner, stopped = string.match(value, '^(.-):%d+:(.-):')
  owner, stopped = owner or value, stopped or ''
  local raw = call('HGET', KEYS[4], key)
  local t = raw and {struct.unpack(EXTENDED, raw)} or {255, NOBODY, 0, FREE, -1, -1, -1, 0, -1, 0}
  local entry = {line = raw and string.sub(raw, t[11]) or '', last = t[9], far = t[10]}
  local all, returned, more = take_offsets(key, owner, math.min(budget, 500))
  budget = budget - #all - 5
  add_line(key, entry, all)
  local suspect = t[5]
  for _, o in ipairs(all) do
    if call('SREM', prefix .. 'suspects', text(o)) == 1 then suspect = math.max(suspect, o) end
  end
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
  call('DEL', prefix .. 'waiting:' .. key)
end
for _ = 1, 64 do
  if budget <= 0 then break end
  local some = call('HRANDFIELD', groups, 16, 'WITHVALUES') or {}
  if #some == 0 or (#some == 2 and some[1] == '') then
    call('DEL', groups)
    break
  end
  for i = 1, #some, 2 do
    if budget <= 0 then break end
    if some[i] ~= '' then convert_key(some[i], some[i + 1]) end
  end
end
if call('EXISTS', groups) == 1 then return {'OK', 1} end

-- 3. Letters, as unsettled as batches are.
for _, o in ipairs(call('HKEYS', KEYS[13])) do call('ZADD', KEYS[11], o, 'letter:' .. o) end

-- 4. Consumers, and the end.
local consumers = call('HKEYS', prefix .. 'consumers')
for i = 1, math.min(#consumers, 200) do
  call('DEL', prefix .. 'held:' .. consumers[i], prefix .. 'more:' .. consumers[i])
  call('HDEL', prefix .. 'consumers', consumers[i])
end
if #consumers > 200 then return {'OK', 1} end
call('DEL', prefix .. 'consumers', prefix .. 'suspects', prefix .. 'bell', KEYS[9])
local progress = {struct.unpack('<ddddddddddddddddc6c6', call('HGET', KEYS[2], 'converted'))}
local returned = tonumber(call('HGET', KEYS[2], 'returning') or 0)
progress[2], progress[15] = progress[2] + returned, progress[15] + returned
call('HSET', KEYS[2], 'progress', struct.pack('<ddddddddddddddddc6c6', unpack(progress, 1, 18)))
call('HDEL', KEYS[2], 'converting', 'converted', 'returning')
return {'OK', 0}
