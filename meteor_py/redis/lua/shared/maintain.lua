#!lua flags=allow-oom
-- Do part of the work that no step does: take back the records of a consumer that is dead or leaving,
-- end delays, and assign dead letters to consumers for publishing. A dead letter that is not published
-- within a lease is assigned again. Consumers call this script while replies say that maintenance is
-- due. The call has no number, because repeating it is harmless.
--
-- KEYS, ARGV 1 to 3: see shared/_group.lua
-- ARGV  4 'leave' if this consumer is leaving, else ''
-- Returns {'OK', 1 if maintenance is still due, {offset, details, ...} of dead letters to publish,
--   1 if this consumer has not left yet, dropped: 'o:failures,...'}, or
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'FENCED', number of its last step or -1, its report}
-- Atomic because a record must not be lost between a batch and the waiting records of its key.

local RETURN = 64 -- a call that has taken back this many records takes back no further batch
local waits = call('ZCARD', KEYS[11])
-- Library shared/_returns is inserted here.

-- A consumer died. `blame` was the first record of this key that it held, and `top` the last. Any
-- record in between may have killed it, so from now on these records are delivered one at a time. The
-- death counts as a failure of the first record, unless the group would then give up on a record that
-- has not yet been delivered alone.
local function blame_first(k, t)
  local x = t.extended
  local o, suspected = x.blame, x.blame <= x.suspect
  x.suspect, x.blame, x.top = max(x.suspect, x.top), -1, -1
  if not is_waiting(k, t, o) then return end -- the record was purged
  local failures = tonumber(call('HGET', KEYS[13], text(o)) or 0)
  if (suspected or failures + 1 ~= tries) and fail(o, k, t, 'Its consumer died.') then
    take_out(k, t, o)
  end
end
-- Take back some records from a consumer; return how many, and whether it holds more.
local function take_back(owner, died)
  local key, by_key, taken = prefix .. 'batches:' .. owner, {}, 0
  local some = call('HRANDFIELD', key, 16, 'WITHVALUES') or {}
  for i = 1, #some, 2 do
    if taken >= RETURN then break end
    local names, line = read_batch(some[i + 1])
    load(names)
    for j, o in ipairs(from_line(line)) do
      local k = names[j] == '' and '\0' .. text(o) or names[j]
      local list = by_key[k] or {}
      by_key[k], list[#list + 1] = list, o
    end
    taken = taken + #names
    call('HDEL', key, some[i])
    marks[owner .. ':' .. some[i]] = false
  end
  for k, list in pairs(by_key) do
    local t = as_table(k)
    table.sort(list)
    if t.held > 0 then let_go(k, t, #list) end
    if died then
      local x = extend(t)
      x.blame = x.blame < 0 and list[1] or min(x.blame, list[1])
      x.top = max(x.top, list[#list])
    end
    put_back(k, t, list)
    disown(k, t)
    if t.extended and t.extended.blame >= 0 and t.held == 0 then blame_first(k, t) end
  end
  return taken, call('EXISTS', key) == 1
end
local function free_kept(k)
  load({k})
  disown(k, as_table(k))
end
local function forget(id)
  told[id] = nil -- otherwise shared/_write would create the `more` list again
  call('UNLINK', prefix .. 'more:' .. id, prefix .. 'wake:' .. id)
end

-- 1. Leave.
local left = false
if ARGV[4] == 'leave' then
  local kept = c.kept
  c.kept = ''
  if kept ~= '' then free_kept(kept) end
  local taken, more = take_back(me, false)
  c.holding, left = c.holding - taken, not more
  if left then
    call('HDEL', KEYS[4], me)
    call('ZREM', KEYS[10], me)
    call('ZREM', KEYS[11], me)
    if p.watcher == me then p.watcher = NOBODY end -- shared/_write wakes another consumer to watch
    forget(me)
  end
end

-- 2. Reap dead consumers. The first call marks a consumer as dead, and all scripts then refuse it. Its
-- entry stays for ten times the lease, so that the consumer can still learn the result of its last step.
if p.reaping == NOBODY and p.reap_at <= p.tick then
  local first = call('ZRANGE', KEYS[10], 0, 0, 'WITHSCORES')
  p.reap_at = tonumber(first[2] or NEVER)
  local raw = first[1] and first[1] ~= me and p.reap_at <= p.tick and call('HGET', KEYS[4], first[1])
  if raw then
    local id, dead = first[1], read_member(raw)
    if dead.dead then
      call('HDEL', KEYS[4], id)
      call('ZREM', KEYS[10], id)
    else
      local kept = dead.kept
      p.reaping, dead.dead, dead.kept = id, true, ''
      if p.watcher == id then p.watcher = NOBODY end
      write_member(id, dead)
      call('ZADD', KEYS[10], p.tick + 10 * lease, id)
      call('ZREM', KEYS[11], id)
      if kept ~= '' then free_kept(kept) end
    end
  elseif first[1] and first[1] ~= me and p.reap_at <= p.tick then
    call('ZREM', KEYS[10], first[1]) -- the consumer of this lease no longer exists
  end
end
if p.reaping ~= NOBODY then
  local _, more = take_back(p.reaping, true)
  if not more then
    forget(p.reaping)
    p.reaping, p.reaped = NOBODY, p.reaped + 1
  end
end

-- 3. End delays, and assign dead letters.
local letters_out = {}
if p.due <= p.clock then
  local now_due = text(p.clock)
  local due = call('ZRANGEBYSCORE', KEYS[9], '-inf', now_due, 'LIMIT', 0, 64)
  load(due)
  many('ZREM', KEYS[9], due)
  for _, k in ipairs(due) do
    local t = as_table(k)
    if t.extended and t.extended.stop == DELAYED then
      t.extended.stop = t.held > 0 and t.line ~= '' and BEHIND or FREE
      if t.owner ~= NOBODY and t.line ~= '' then tell(t.owner, k) end
    end
  end
  for _, o in ipairs(call('ZRANGEBYSCORE', KEYS[15], '-inf', now_due, 'LIMIT', 0, 16)) do
    call('ZADD', KEYS[15], p.clock + lease, o)
    letters_out[#letters_out + 1] = o
    letters_out[#letters_out + 1] = call('HGET', KEYS[14], o) or ''
  end
  p.due = NEVER
  for _, key in ipairs({KEYS[9], KEYS[15]}) do
    local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    if first then p.due = min(p.due, tonumber(first)) end
  end
end

local mode, want, got, stop, cut, stored_stop = 'maintain', 0, 0, false, false, 0
-- Library shared/_write is inserted here.
if not left then write_member(me, c) end
return {'OK', maintenance_due, letters_out, left and 0 or 1, concat(dropped, ',')}
