-- What the scripts of distributed groups share: each begins with this text. First the clock is read,
-- then whoever is overdue is dropped: so any living client is the failure detector of all.
--
-- KEYS[1] is what the keys of the group begin with, and carries its hash tag: all keys are of one
-- slot. They are described in keys.py.

local call, format, match, max, min = redis.call, string.format, string.match, math.max, math.min
local P = KEYS[1]
local STATE, MEMBERS = P .. 'state', P .. 'members'
local DEADLINES, EXPIRATIONS = P .. 'deadlines', P .. 'expirations'
local CANDIDATES, EVENTS = P .. 'candidates', P .. 'events'
local POLLS, LIMITS, PENDING = P .. 'polls', P .. 'limits', P .. 'pending'

local function int(x) return format('%.0f', x) end

local c = call('HMGET', P .. 'config', 'ttl', 'expiration', 'election', 'min_size')
if not c[1] then return {'NOGROUP'} end
local TTL, EXPIRATION, ELECTION, MIN_SIZE = tonumber(c[1]), tonumber(c[2]), c[3], tonumber(c[4])
local s = call('HMGET', STATE, 'last', 'leader', 'term', 'session', 'life', 'mark')
if not s[5] then return {'NOGROUP'} end
local last, leader, term, session = tonumber(s[1] or nil), s[2] or '', tonumber(s[3] or 0), s[4] or ''
local life, mark = s[5], s[6] or ''

-- If nothing was heard for long, the server was away, or its clock was set: then members have all the
-- time again to be heard of, and the rest keeps the time that it had left. A small step back stands
-- still.
local micros
local function read_clock()
  local time = call('TIME')
  micros = time[1] .. format('%06d', time[2])
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local gap = now - (last or now)
  if math.abs(gap) > TTL / 2 then
    local members = call('ZRANGE', DEADLINES, 0, -1)
    for i = 1, #members do call('ZADD', DEADLINES, int(now + TTL), members[i]) end
    for _, key in ipairs({EXPIRATIONS, POLLS}) do
      local all = call('ZRANGE', key, 0, -1, 'WITHSCORES')
      for i = 1, #all, 2 do call('ZADD', key, int(all[i + 1] + gap), all[i]) end
    end
    call('HINCRBY', STATE, 'graces', 1)
  elseif gap < 0 then
    now = last
  end
  if now ~= last then call('HSET', STATE, 'last', int(now)) end
  return now
end
local now = read_clock()

-- One event for each change, numbered without gaps: the number is the view. Each names the mark of the
-- one before: after a fail-over that lost some, the same numbers are other events, with other marks.
local function emit(kind, ...)
  local view = int(call('HINCRBY', STATE, 'view', 1))
  local after = mark
  mark = view .. '.' .. micros
  call('HSET', STATE, 'mark', mark)
  call('XADD', EVENTS, 'MAXLEN', '~', 10000, view .. '-0', 'kind', kind, 'at', int(now),
       'mark', mark, 'after', after, ...)
end

-- Members: 'index:session:persistent:alive:priority:joined:metadata'. The session of one that is dead
-- has a '-' before it: it is nobody's, but the one who had it can tell that it was the last.
local function read_member(id)
  local raw = call('HGET', MEMBERS, id)
  if not raw then return nil end
  local m = {}
  m.index, m.session, m.persistent, m.alive, m.priority, m.joined, m.metadata =
    match(raw, '^(%d+):(.-):(.):(.):(%-?%d+):(%d+):(.*)$')
  return m
end
local function write_member(id, m)
  call('HSET', MEMBERS, id, m.index .. ':' .. m.session .. ':' .. m.persistent .. ':' .. m.alive
       .. ':' .. m.priority .. ':' .. m.joined .. ':' .. m.metadata)
end

-- The leader: the first of the candidates, by priority, and then the oldest, or any.
-- Who resigns ('not_id') comes last, whatever its priority.
local function candidate(not_id)
  local first = call('ZRANGE', CANDIDATES, 0, 1, 'WITHSCORES')
  local i = first[1] == not_id and first[3] and 3 or 1
  if not first[i] or ELECTION == 'oldest' then return first[i] end
  local level = math.floor(first[i + 1] / 1e12)
  local same = call('ZRANGEBYSCORE', CANDIDATES, int(level * 1e12), '(' .. int((level + 1) * 1e12))
  local n = micros % #same + 1
  if same[n] == not_id and #same > 1 then n = n % #same + 1 end
  return same[n]
end
local function elect(not_id)
  if ELECTION == 'none' or leader ~= '' or call('ZCARD', DEADLINES) < MIN_SIZE then return end
  local id = candidate(not_id)
  local m = id and read_member(id)
  if not m then return end
  -- Numbers follow the clock: one that was lost with a fail-over is not given out again.
  term = max(term + 1, now)
  leader, session = id, m.session
  call('HSET', STATE, 'leader', leader, 'term', int(term), 'session', session)
  emit('elected', 'member', id, 'term', int(term))
end
local function depose(reason, ...)
  if leader == '' then return end
  local id = leader
  leader, session = '', ''
  call('HSET', STATE, 'leader', '', 'session', '')
  emit('resigned', 'member', id, 'term', int(term), 'reason', reason, ...)
end

-- Messages.
local function complete(id, member, ok, value)
  local key = P .. 'message:' .. id
  local m = call('HMGET', key, 'from', 'verb', 'need')
  if not m[3] or call('HSETNX', key, 'r:' .. member, ok .. ':' .. value) == 0 then return end
  local got = call('HINCRBY', key, 'got', 1)
  if m[2] ~= 'tell' and got == tonumber(m[3]) then
    local replies = P .. 'replies:' .. m[1]
    call('XADD', replies, 'MAXLEN', '~', 10000, '*', 'id', id)
    call('PEXPIRE', replies, 3600000)
  end
end
local function deliver(member, fields) call('XADD', P .. 'inbox:' .. member, '*', unpack(fields)) end
local function alive() return call('ZRANGE', DEADLINES, 0, -1) end

-- What lies in the inbox of somebody who is gone: what was for anybody goes to another.
local function drain(id, left)
  local inbox = P .. 'inbox:' .. id
  local others
  for _, entry in ipairs(call('XRANGE', inbox, '-', '+')) do
    local f = {}
    for i = 1, #entry[2], 2 do f[entry[2][i]] = entry[2][i + 1] end
    if f.to == 'any' then
      others = others or alive()
      call('XDEL', inbox, entry[1])
      local tries = tonumber(f.tries) + 1
      if #others == 0 or tries > 16 then
        complete(f.id, id, 'left', '')
      else
        for i = 1, #entry[2], 2 do
          if entry[2][i] == 'tries' then entry[2][i + 1] = int(tries) end
        end
        deliver(others[(tonumber(f.random) + tries) % #others + 1], entry[2])
      end
    elseif left then
      complete(f.id, id, 'left', '')
    end
  end
  if left then call('DEL', inbox) end
end

-- Polls: each voter's field is '-', 'y', 'n', 'a' (abstains) or 'g' (gone). Who voted in which way is
-- told as lists of ids: a field for each would be more than a script may hand to a command.
local function describe(id)
  local key = P .. 'poll:' .. id
  local f = call('HMGET', key, 'result', 'reason', 'decided', 'rule', 'quorum', 'until', 'topic',
                 'when', 'name', 'by', 'error')
  if not f[4] then return nil end
  local lists = {y = {}, n = {}, a = {}, ['-'] = {}}
  lists.g = lists['-']
  local votes = call('HGETALL', P .. 'votes:' .. id)
  for i = 1, #votes, 2 do table.insert(lists[votes[i + 1]], votes[i]) end
  return {'poll', id, 'result', f[1] or '', 'reason', f[2] or '', 'decided', f[3] or '',
          'rule', f[4], 'quorum', f[5], 'until', f[6], 'topic', f[7], 'when', f[8], 'name', f[9],
          'by', f[10], 'error', f[11],
          'yes', table.concat(lists.y, ','), 'no', table.concat(lists.n, ','),
          'abstained', table.concat(lists.a, ','), 'missing', table.concat(lists.g, ',')}
end
local function decide(id, result, reason)
  local key = P .. 'poll:' .. id
  local f = call('HMGET', key, 'when', 'name')
  call('ZREM', POLLS, id)
  call('ZREM', LIMITS, id)
  if not f[1] then return end  -- somebody has deleted it
  call('HSET', key, 'result', result, 'reason', reason, 'decided', int(now))
  -- What was agreed on can be looked up until it is done, by who comes back in between.
  local keep = int(max((tonumber(f[1]) or now) - now, 0) + 3600000)
  call('PEXPIRE', key, keep)
  call('PEXPIRE', P .. 'votes:' .. id, keep)
  if result == 'no' and match(call('HGET', PENDING, f[2]) or '', '^(.-):') == id then
    call('HDEL', PENDING, f[2])
  end
  emit('decided', unpack(describe(id)))
end
local function count(id, reason)
  local quorum = tonumber(call('HGET', P .. 'poll:' .. id, 'quorum') or 0)
  local yes, open = 0, 0
  local votes = call('HVALS', P .. 'votes:' .. id)
  for i = 1, #votes do
    if votes[i] == 'y' then yes = yes + 1 elseif votes[i] == '-' then open = open + 1 end
  end
  if yes >= quorum then
    decide(id, 'yes', 'passed')
  elseif yes + open < quorum then
    decide(id, 'no', reason)
  end
end
-- Who is gone can say yes no more. A vote that was given stays.
local function unseat(member)
  for _, id in ipairs(call('ZRANGE', POLLS, 0, -1)) do
    local votes = P .. 'votes:' .. id
    if call('HGET', votes, member) == '-' then
      call('HSET', votes, member, 'g')
      count(id, 'left')
    end
  end
end

-- Take somebody out: 'left', 'removed' or 'expired'; who 'stays', if it has a name, is only dead. The
-- caller elects, so that nobody is elected who is taken out right after.
local function drop(id, reason, stays)
  local m = read_member(id)
  call('ZREM', DEADLINES, id)
  call('ZREM', CANDIDATES, id)
  call('ZREM', EXPIRATIONS, id)
  if not m then  -- a part of the group was deleted
    if leader == id then depose(reason) end
    return
  end
  local was = m.session
  if m.persistent == '1' and stays then
    if m.alive == '0' then return end
    m.alive, m.session = '0', '-' .. was
    write_member(id, m)
    if EXPIRATION >= 0 then call('ZADD', EXPIRATIONS, int(now + EXPIRATION), id) end
    emit('dead', 'member', id, 'session', was, 'reason', reason)
    drain(id, false)
  else
    call('HDEL', MEMBERS, id)
    emit('left', 'member', id, 'session', was, 'reason', reason)
    drain(id, true)
  end
  unseat(id)
  if leader == id then depose(reason) end
end

for _, id in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', '(' .. int(now), 'LIMIT', 0, 64)) do
  drop(id, 'expired', true)
end
for _, id in ipairs(call('ZRANGEBYSCORE', EXPIRATIONS, '-inf', int(now), 'LIMIT', 0, 64)) do
  drop(id, 'expired', false)
end
elect()
-- A vote on something to be done at a time closes before that time, whatever was shifted.
for _, key in ipairs({POLLS, LIMITS}) do
  for _, id in ipairs(call('ZRANGEBYSCORE', key, '-inf', int(now), 'LIMIT', 0, 64)) do
    decide(id, 'no', 'timeout')
  end
end
