-- Peer group state: drops overdue members, and elects a leader. Needs _members.lua, _clock.lua and
-- _messages.lua. Every script that includes this file, directly or in _due_work.lua, therefore also
-- detects failed members. Only open.lua and the scripts that send and settle messages do not.

-- Maximum number of times that a message sent to 'any' moves to another member. It moves only when its
-- receiver dies or leaves, so only a long series of receivers that never handle it can reach the limit.
local MOVES = 1000

-- Every change is one event. Events are numbered without gaps, and the number is the view. Each event
-- contains the previous event's mark: after a failover that lost events, the same numbers have
-- different marks.
local function emit(kind, ...)
  local after = mark
  view = view + 1
  mark = int(view) .. '.' .. micros
  call('HSET', STATE, 'view', int(view), 'mark', mark)
  call('XADD', EVENTS, 'MAXLEN', '~', 10000, int(view) .. '-0', 'kind', kind, 'at', int(now),
       'mark', mark, 'after', after, ...)
end

local function write_member(id, m)
  call('HSET', MEMBERS, id, m.index .. ':' .. m.session .. ':' .. m.persistent .. ':' .. m.alive
       .. ':' .. m.priority .. ':' .. m.joined .. ':' .. m.metadata)
end

-- Make sure that a script looks for due work at this time or earlier.
local function due_at(time)
  if time >= due then return end
  due = time
  call('HSET', STATE, 'due', int(due))
end
local function live(most)
  return call('ZRANGEBYSCORE', DEADLINES, int(now), '+inf', 'LIMIT', 0, int(most or -1))
end
local function alive(most) return alive_at(now, most) end
local function late(id)
  local deadline = call('ZSCORE', DEADLINES, id)
  return not deadline or tonumber(deadline) < now
end

-- Choose a leader: the oldest or a random member among those with the highest priority.
-- A member that resigns ('not_id') is the last choice, whatever its priority.
local function candidate(not_id)
  local same, level, resigned = {}, nil, nil
  local all = call('ZRANGE', CANDIDATES, 0, -1, 'WITHSCORES')
  for i = 1, #all, 2 do
    local id, its_level = all[i], math.floor(all[i + 1] / 1e12)
    if level and its_level ~= level then break end
    local can = not late(id)
    if can and id == not_id then
      resigned = id
    elseif can then
      if ELECTION == 'oldest' then return id end
      level = its_level
      same[#same + 1] = id
    end
  end
  return same[micros % max(#same, 1) + 1] or resigned
end
local function elect(not_id)
  if ELECTION == 'none' or leader ~= '' or #alive(MIN_SIZE) < MIN_SIZE then return end
  local id = candidate(not_id)
  local m = id and read_member(id)
  if not m then return end
  -- Terms follow the clock, so that a term lost in a failover is never reused.
  term = max(term + 1, now)
  leader, session = id, m.session
  call('HSET', STATE, 'leader', leader, 'term', int(term), 'session', session)
  emit('elected', 'member', id, 'term', int(term))
end
local deposed = false
local function depose(reason, ...)
  if leader == '' then return end
  local id = leader
  leader, session, deposed = '', '', true
  call('HSET', STATE, 'leader', '', 'session', '')
  emit('resigned', 'member', id, 'term', int(term), 'reason', reason, ...)
end

-- Choose a receiver for a message sent to 'any'. A full inbox gets the message only if all inboxes are
-- full: a message that was accepted cannot be refused later.
local function choose(others, number)
  while #others.roomy > 0 do
    local n = number % #others.roomy + 1
    local id = others.roomy[n]
    others.size[id] = others.size[id] or call('XLEN', P .. 'inbox:' .. id)
    if others.size[id] < MAX_INBOX then
      others.size[id] = others.size[id] + 1
      return id
    end
    others.roomy[n] = others.roomy[#others.roomy]
    others.roomy[#others.roomy] = nil
  end
  return others.all[number % #others.all + 1]
end
-- Move a message to another member; return the size of its body in bytes. The former receiver may have
-- begun to handle the message, so the message's delivery count moves too.
local function move(inbox, owner, others, place)
  local entry = call('XRANGE', P .. 'inbox:' .. inbox, place, place)[1]
  if not entry then  -- part of the group was deleted
    call('ZREM', P .. 'movable:' .. inbox, place)
    return 0
  end
  local fields = entry[2]
  local f = pairs_of(fields)
  local begun = match(call('HGET', P .. 'begun:' .. inbox, place) or '0', '^%d+')
  local tries = tonumber(f.tries) + 1
  if #others.all == 0 or tries > MOVES then
    bury(owner, #others.all == 0 and 'no member is left' or 'it moved too often', fields, f)
    discard(inbox, place, f, true)
    complete(f.id, owner, 'left', '')
    return #f.body
  end
  discard(inbox, place, f, true)
  local deliveries = int((tonumber(f.deliveries) or 1) + begun)
  for i = 1, #fields, 2 do
    if fields[i] == 'tries' then fields[i + 1] = int(tries) end
    if fields[i] == 'deliveries' then fields[i + 1] = deliveries end
  end
  if not f.deliveries then
    fields[#fields + 1], fields[#fields + 2] = 'deliveries', deliveries
  end
  deliver(choose(others, tonumber(f.random) + tries), f, fields)
  return #f.body
end

-- When a member dies or leaves, its inbox becomes an orphan. Messages that were sent to 'any' move
-- to another member. If the member was removed, the senders of its other messages get an error. Each
-- call does part of this work, since an inbox may hold a million messages or a gigabyte. A dead named
-- member keeps its other messages. If there is no other member, it keeps all of its messages until
-- another member joins or the dead one rejoins.
local budget, bytes = 500, 262144
local function others_than(owner)
  local others = {all = {}, roomy = {}, size = {}}
  local function add(ids)
    for _, other in ipairs(ids) do
      if other ~= owner then
        others.all[#others.all + 1] = other
        others.roomy[#others.roomy + 1] = other
      end
    end
  end
  add(alive())
  if #others.all == 0 then add(live()) end  -- a leaving member is better than none
  return others
end
local function take(key)
  local some = budget > 0 and call('ZRANGE', key, 0, int(budget - 1)) or {}
  budget = budget - #some
  return some
end
local function hand_over(inbox)
  local movable, awaited = P .. 'movable:' .. inbox, P .. 'awaited:' .. inbox
  local shared = P .. 'shared:' .. inbox
  local owner = match(inbox, '^~.-~(.*)$')
  local gone = owner ~= nil
  owner = owner or inbox
  if call('EXISTS', movable) == 1 then
    local others = others_than(owner)
    if #others.all == 0 and not gone then
      call('HSET', STATE, 'stranded', 1)
      call('ZREM', ORPHANS, inbox)
      return
    end
    for _, place in ipairs(take(movable)) do
      if bytes <= 0 then break end
      bytes = bytes - move(inbox, owner, others, place)
    end
    if call('EXISTS', movable) == 1 then return end
  end
  if gone then
    for _, one in ipairs(take(awaited)) do
      complete(match(one, ' (.*)$'), owner, 'left', '')
      call('ZREM', awaited, one)
    end
    for _, id in ipairs(take(shared)) do
      release_body(id)
      call('ZREM', shared, id)
    end
    if call('EXISTS', awaited, shared) > 0 then return end
    call('UNLINK', P .. 'inbox:' .. inbox, P .. 'begun:' .. inbox)
  end
  call('ZREM', ORPHANS, inbox)
end
local function orphan(inbox)
  orphans = true
  call('ZADD', ORPHANS, int(now), inbox)
  due_at(now)
  hand_over(inbox)
end
-- Rename the inbox to a name that no member can have, so that a new member with the old name starts
-- with an empty inbox.
local function orphan_for_good(id)
  local inbox = '~' .. mark .. '~' .. id
  call('ZREM', ORPHANS, id)
  for _, part in ipairs({'inbox:', 'movable:', 'awaited:', 'shared:', 'begun:'}) do
    if call('EXISTS', P .. part .. id) == 1 then
      call('RENAME', P .. part .. id, P .. part .. inbox)
    end
  end
  orphan(inbox)
end

-- Polls: each voter's field is '-' (open), 'y', 'n', 'a' (abstained) or 'g' (gone). Events list voter
-- ids by vote. One field per voter could exceed the number of arguments that a script may pass to a
-- command.
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
  if not f[1] then return end  -- the poll was deleted
  call('HSET', key, 'result', result, 'reason', reason, 'decided', int(now))
  -- Members that rejoin before an agreed action is due must be able to find its poll.
  local keep = int(max((tonumber(f[1]) or now) - now, 0) + HOUR)
  call('PEXPIRE', key, keep)
  call('PEXPIRE', P .. 'votes:' .. id, keep)
  if result == 'no' and match(call('HGET', PENDING, f[2]) or '', '^(.-):') == id then
    call('HDEL', PENDING, f[2])
    call('ZREM', AGENDA, f[2])
  end
  emit('decided', unpack(describe(id)))
end
-- Count one vote. A poll may have a thousand votes, too many to count again whenever one arrives.
local function tally(id, vote, reason)
  local key = P .. 'poll:' .. id
  local quorum = tonumber(call('HGET', key, 'quorum') or nil)
  if not quorum then return decide(id, 'no', reason) end  -- the poll was deleted
  call('HSET', P .. 'votes:' .. id, vote.member, vote.says)
  local open = call('HINCRBY', key, 'open', -1)
  local yes = call('HINCRBY', key, 'yes', vote.says == 'y' and 1 or 0)
  if yes >= quorum then
    decide(id, 'yes', 'passed')
  elseif yes + open < quorum then
    decide(id, 'no', reason)
  end
end
-- A member that has left cannot vote. If it has already voted, its vote still counts.
local function unseat(member)
  for _, id in ipairs(call('ZRANGE', POLLS, 0, -1)) do
    if call('HGET', P .. 'votes:' .. id, member) == '-' then
      tally(id, {member = member, says = 'g'}, 'left')
    end
  end
end
-- Elect a leader. If this call has deposed the leader and there is no successor, end the votes that
-- need a leader.
local function succeed(not_id)
  elect(not_id)
  if not deposed or leader ~= '' then return end
  for _, id in ipairs(call('ZRANGE', POLLS, 0, -1)) do
    if call('HGET', P .. 'poll:' .. id, 'led') == '1' then decide(id, 'no', 'no leader') end
  end
end
-- Forget actions an hour after they were due, a few per call.
local function prune()
  for _, name in ipairs(call('ZRANGEBYSCORE', AGENDA, '-inf', int(now - HOUR), 'LIMIT', 0, 64)) do
    call('ZREM', AGENDA, name)
    call('HDEL', PENDING, name)
  end
end

-- Remove a member as 'left', 'removed' or 'expired'. With 'stays', mark a named member as dead instead.
-- The caller holds the election afterwards, so that a member about to be dropped is not elected.
local function drop(id, reason, stays)
  local m = read_member(id)
  for _, key in ipairs({DEADLINES, CANDIDATES, LEAVING, EXPIRATIONS, GRACED}) do
    call('ZREM', key, id)
  end
  call('HDEL', HANDLERS, id)
  if not m then  -- part of the group was deleted
    if leader == id then depose(reason) end
    return
  end
  local was = m.session
  if m.persistent == '1' and stays then
    if m.alive == '0' then return end
    m.alive, m.session = '0', '-' .. was
    write_member(id, m)
    if EXPIRATION >= 0 then
      call('ZADD', EXPIRATIONS, int(now + EXPIRATION), id)
      due_at(now + EXPIRATION)
    end
    emit('dead', 'member', id, 'session', was, 'reason', reason)
    orphan(id)
  else
    call('HDEL', MEMBERS, id)
    emit('left', 'member', id, 'session', was, 'reason', reason)
    orphan_for_good(id)
  end
  unseat(id)
  if leader == id then depose(reason) end
end

-- Drop expired members, a few per call.
local function sweep(key, before, stays)
  for _, id in ipairs(call('ZRANGEBYSCORE', key, '-inf', before, 'LIMIT', 0, 64)) do
    drop(id, 'expired', stays)
  end
end
local function sweep_all()
  for _, inbox in ipairs(call('ZRANGE', ORPHANS, 0, 63)) do
    orphans = true
    hand_over(inbox)
  end
  sweep(DEADLINES, '(' .. int(now), true)
  sweep(EXPIRATIONS, int(now), false)
  succeed()
  -- LIMITS closes a vote on an action before the action is due, even if a grace period moved the
  -- vote's deadline.
  for _, key in ipairs({POLLS, LIMITS}) do
    for _, id in ipairs(call('ZRANGEBYSCORE', key, '-inf', int(now), 'LIMIT', 0, 64)) do
      decide(id, 'no', 'timeout')
    end
  end
  due = now + TTL / 3
  for _, key in ipairs({DEADLINES, EXPIRATIONS, POLLS, LIMITS}) do
    local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
    if first[2] then due = min(due, tonumber(first[2])) end
  end
  if call('EXISTS', ORPHANS) == 1 then due = now end
  call('HSET', STATE, 'due', int(due))
end
if now >= due then sweep_all() end
