-- What the scripts of distributed groups share: each begins with this text. First the clock is read,
-- then whoever is overdue is dropped: so any living client is the failure detector of all.
--
-- KEYS[1] is what the keys of the group begin with, and carries its hash tag: all keys are of one
-- slot. They are described in keys.py.

local call, format, match, max, min = redis.call, string.format, string.match, math.max, math.min
local P = KEYS[1]
local STATE, MEMBERS = P .. 'state', P .. 'members'
local DEADLINES, EXPIRATIONS = P .. 'deadlines', P .. 'expirations'
local CANDIDATES, EVENTS, POLLS, LIMITS = P .. 'candidates', P .. 'events', P .. 'polls', P .. 'limits'

local function int(x) return format('%.0f', x) end

local c = call('HMGET', P .. 'config', 'ttl', 'expiration', 'election', 'min_size')
if not c[1] then return {'NOGROUP'} end
local TTL, EXPIRATION, ELECTION, MIN_SIZE = tonumber(c[1]), tonumber(c[2]), c[3], tonumber(c[4])
local s = call('HMGET', STATE, 'last', 'leader', 'term', 'session')
local last, leader, term, session = tonumber(s[1] or nil), s[2] or '', tonumber(s[3] or 0), s[4] or ''

-- If nothing was heard for long, the server was away, or its clock was set: then everybody keeps the
-- time that he had left. A small step back stands still.
local function read_clock()
  local time = call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local gap = now - (last or now)
  if math.abs(gap) > TTL / 2 then
    for _, key in ipairs({DEADLINES, EXPIRATIONS, POLLS}) do
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

-- One event for each change, numbered without gaps: the number is the view.
local view
local function emit(kind, ...)
  view = call('HINCRBY', STATE, 'view', 1)
  call('XADD', EVENTS, 'MAXLEN', '~', 10000, int(view) .. '-0', 'kind', kind, 'at', int(now), ...)
end

-- Members: 'index:session:persistent:alive:priority:joined:metadata'.
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
local function candidate()
  local first = call('ZRANGE', CANDIDATES, 0, 0, 'WITHSCORES')
  if not first[1] or ELECTION == 'oldest' then return first[1] end
  local level = math.floor(first[2] / 1e12)
  local same = call('ZRANGEBYSCORE', CANDIDATES, int(level * 1e12), '(' .. int((level + 1) * 1e12))
  return same[now % #same + 1]
end
local function elect()
  if ELECTION == 'none' or leader ~= '' or call('ZCARD', DEADLINES) < MIN_SIZE then return end
  local id = candidate()
  if not id then return end
  -- Numbers follow the clock: one that was lost with a fail-over is not given out again.
  term = max(term + 1, now)
  leader, session = id, read_member(id).session
  call('HSET', STATE, 'leader', leader, 'term', int(term), 'session', session)
  emit('elected', 'member', id, 'term', int(term))
end
local function depose(reason)
  if leader == '' then return end
  local id = leader
  leader, session = '', ''
  call('HSET', STATE, 'leader', '', 'session', '')
  emit('resigned', 'member', id, 'term', int(term), 'reason', reason)
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

-- Polls: each voter's field is '-', 'y', 'n', 'a' (abstains) or 'g' (gone).
local function decide(id, result, reason)
  local key = P .. 'poll:' .. id
  call('HSET', key, 'result', result, 'reason', reason)
  call('ZREM', POLLS, id)
  call('ZREM', LIMITS, id)
  local f = call('HMGET', key, 'topic', 'at', 'by', 'name')
  local votes = call('HGETALL', P .. 'votes:' .. id)
  for i = 1, #votes, 2 do votes[i] = 'vote:' .. votes[i] end
  call('PEXPIRE', key, 3600000)
  call('PEXPIRE', P .. 'votes:' .. id, 3600000)
  emit('decided', 'poll', id, 'result', result, 'reason', reason, 'topic', f[1], 'when', f[2],
       'by', f[3], 'name', f[4], unpack(votes))
end
local function count(id)
  local quorum = tonumber(call('HGET', P .. 'poll:' .. id, 'quorum'))
  local yes, open = 0, 0
  local votes = call('HVALS', P .. 'votes:' .. id)
  for i = 1, #votes do
    if votes[i] == 'y' then yes = yes + 1 elseif votes[i] == '-' then open = open + 1 end
  end
  if yes >= quorum then
    decide(id, 'yes', 'passed')
  elseif yes + open < quorum then
    decide(id, 'no', 'rejected')
  end
end
local function unseat(member)
  for _, id in ipairs(call('ZRANGE', POLLS, 0, -1)) do
    local votes = P .. 'votes:' .. id
    if call('HGET', votes, member) == '-' then
      call('HSET', votes, member, 'g')
      count(id)
    end
  end
end

-- Take somebody out: 'left', 'removed', 'expired', or replaced by the same name elsewhere.
local function drop(id, reason)
  local m = read_member(id)
  if not m then return end
  call('ZREM', DEADLINES, id)
  call('ZREM', CANDIDATES, id)
  if m.persistent == '1' and reason == 'expired' then
    m.alive, m.session = '0', ''
    write_member(id, m)
    if EXPIRATION >= 0 then call('ZADD', EXPIRATIONS, int(now + EXPIRATION), id) end
    emit('dead', 'member', id)
    drain(id, false)
  else
    call('HDEL', MEMBERS, id)
    call('ZREM', EXPIRATIONS, id)
    emit('left', 'member', id, 'reason', reason)
    drain(id, true)
  end
  unseat(id)
  if leader == id then
    depose(reason)
    elect()
  end
end

for _, id in ipairs(call('ZRANGEBYSCORE', DEADLINES, '-inf', '(' .. int(now), 'LIMIT', 0, 64)) do
  drop(id, 'expired')
end
for _, id in ipairs(call('ZRANGEBYSCORE', EXPIRATIONS, '-inf', int(now), 'LIMIT', 0, 64)) do
  drop(id, 'removed')
end
-- A vote on something to be done at a time closes before that time, whatever was shifted.
for _, key in ipairs({POLLS, LIMITS}) do
  for _, id in ipairs(call('ZRANGEBYSCORE', key, '-inf', int(now), 'LIMIT', 0, 64)) do
    decide(id, 'no', 'timeout')
  end
end
