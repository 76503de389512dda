-- Library for the end of shared/step and shared/maintain: writes the changes, except for the calling
-- consumer's own entry, and wakes idle consumers. It reads `mode`, `want`, `got`, `stop`, `cut`,
-- `stored_stop` and `waits`, and sets three items of the reply: `idle`, what to do if nothing was
-- granted; `wait`, the ms until maintenance is due; and `maintenance_due`.
local unsettled, settled = {}, {}
for mark, o in pairs(marks) do
  if o then
    unsettled[#unsettled + 1], unsettled[#unsettled + 2] = o, mark
  else
    settled[#settled + 1] = mark
  end
end
many('ZREM', KEYS[12], settled)
many('ZADD', KEYS[12], unsettled)
for low = 1, #healed, 1000 do
  p.failing = p.failing - call('HDEL', KEYS[13], unpack(healed, low, min(low + 999, #healed)))
end

-- Write the key entries, and update the sets that list keys: `ready`, KEYS[7], and `blocked`, KEYS[8].
local set, gone, sets, goes = {}, {}, 0, 0
local out, into -- the keys to remove from each set and to add to it, by the set's number in KEYS
for k, before in pairs(stored) do
  local t = entries[k]
  local raw, kind = t, t ~= 0 and t ~= 1 and t ~= before and type(t) -- comparing is cheaper than type()
  if t == 0 then
    raw = false
  elseif t == 1 then
    raw = own_one
  elseif kind == 'number' then
    raw = me .. pack('<H', t)
  elseif kind == 'table' then
    out, into = out or {[7] = {}, [8] = {}}, into or {[7] = {}, [8] = {}}
    local x = t.extended
    if t.held == 0 and t.line == '' and not (x and (x.stop == DELAYED or x.stop == PARKED)) then
      raw = false
    elseif x and (x.stop ~= FREE or x.suspect >= 0 or x.blame >= 0 or x.far > 0) then
      raw = pack(EXTENDED, 255, t.owner, t.held, x.stop, x.suspect, x.blame, x.top, x.first, x.last,
                 x.far) .. t.line
    else
      raw = t.owner .. pack('<H', t.held) .. t.line
    end
    local place = t.line ~= '' and (x and x.stop ~= FREE and 8 or t.owner == NOBODY and 7)
    if t.set and t.set ~= place then
      local list = out[t.set]
      list[#list + 1] = k
    end
    if place and raw ~= before then
      local list = into[place]
      list[#list + 1], list[#list + 2] = (unpack_struct('<I7', t.line)), k
    end
  end
  if raw and raw ~= before then
    set[sets + 1], set[sets + 2], sets = k, raw, sets + 2
  elseif not raw and before then
    gone[goes + 1], goes = k, goes + 1
  end
end
many('HSET', KEYS[5], set)
many('HDEL', KEYS[5], gone)
for place = 7, out and 8 or 0 do
  many('ZREM', KEYS[place], out[place])
  many('ZADD', KEYS[place], into[place])
end
for owner, list in pairs(told) do many('RPUSH', prefix .. 'more:' .. owner, list) end

-- Wake idle owners of keys that have more waiting records. If there is other work, wake one more
-- consumer, which will in turn wake others. One idle consumer watches the index and the clock on behalf
-- of all.
local idle, wait = 0, -1
local hungry = mode == 'wait' and got == 0 and want > 0 and stored_stop == 0
local work = (waits > 0 or hungry) and (cut or call('EXISTS', KEYS[7]) == 1
  or (p.next < stream_end and p.waiting < room and stored_stop == 0))
if (p.watcher == me and got > 0) or p.watch_until < p.tick then p.watcher = NOBODY end
if hungry and (stop or not work) then
  c.idle, idle = true, 1
  call('ZADD', KEYS[11], p.clock, me)
  if p.watcher == NOBODY or p.watcher == me then
    p.watcher, p.watch_until, idle = me, p.tick + floor(lease / 2), 2
    wait = max(min(p.reap_at - p.tick, p.due - p.clock), 1)
    if wait > 2 ^ 31 then wait = -1 end
  end
end
if waits > 0 then
  local function wake(id)
    if call('ZREM', KEYS[11], id) == 0 then return end
    call('XADD', prefix .. 'wake:' .. id, 'MAXLEN', '=', 1, '*', 'w', 1)
    waits = waits - 1
  end
  for owner in pairs(told) do
    if owner ~= me or want == 0 then wake(owner) end
  end
  if want == 0 and c.idle and c.holding == 0 and (c.alone or c.kept ~= '') then wake(me) end
  if p.due < due_before and p.watcher ~= NOBODY and (p.watcher ~= me or want == 0) then
    wake(p.watcher)
  end
  if (work and not (hungry and idle == 0)) or p.watcher == NOBODY then
    local one = call('ZRANGE', KEYS[11], 0, 0)[1]
    if one and (one ~= me or want == 0) then wake(one) end
  end
end

call('HSET', KEYS[3], 'progress', pack(PROGRESS, p.next, p.waiting, p.clock, p.tick, p.last, p.reap_at,
     p.due, p.watch_until, p.failing, p.purging, p.acked, p.dead, p.lost, p.purged, p.returned, p.reaped,
     p.reaping, p.watcher))
local maintenance_due = (p.reaping ~= NOBODY or p.reap_at <= p.tick or p.due <= p.clock) and 1 or 0
