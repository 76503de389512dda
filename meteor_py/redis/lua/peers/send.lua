#!lua
-- Store messages in their receivers' inboxes.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 the handle's session, which gets the replies  2 the batch's session  3 the batch's number in
--       its session, higher than the last  4 '1' to skip the clock check  5 ids of the handle's finished
--       messages  6... for each message: id; the sender's id and session, '' if it is not a member;
--       queue; verb: tell, send or ask; target: member, any, all or leader; the member's id if a member
--       is the target; a random number; options: d includes dead members, s excludes the sender,
--       h refuses a queue that no receiver handles; priority; ms after which the sender stops waiting;
--       type of the body; body
-- Returns {'OK', a result for each message...}, or {'NOGROUP'}  {'OLD'}: a later batch was stored
--   {'IDLE'}: no heartbeat has arrived for a long time, or the clock was set; send a heartbeat first, to
--   renew all leases
--   A result is a code and arguments, separated by line breaks: OK and the receivers, NOMEMBER,
--   NOLEADER, FULL and a member, NOHANDLER, or STALE: the sender is no longer that member. There are
--   fewer results than messages if the first messages were enough work for one call.
-- Atomic because a message must reach either all of its receivers or none, and if a receiver leaves
-- later, it must be known whether the message reached it. Idempotent per batch: a repeat after a lost
-- reply returns the same results. If the server's memory is full, it refuses to run the script.

local FIRST, SIZE = 6, 13
-- Deliveries and bytes after which a call ends.
local WORK, BYTES = 500, 1048576

local config = call('HMGET', CONFIG, 'ttl', 'max_inbox')
local state = call('HMGET', STATE, 'life', 'leader', 'last')
if not config[1] or not state[1] then return {'NOGROUP'} end
local TTL, MAX_INBOX, leader = tonumber(config[1]), tonumber(config[2]), state[2] or ''
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(state[3] or now)
if ARGV[4] ~= '1' and math.abs(now - last) > TTL / 2 then return {'IDLE'} end

local sent, batch = P .. 'sender:' .. ARGV[2], tonumber(ARGV[3])
local known, reply = match(call('GET', sent) or '', '^(%d+)\t(.*)$')
if known and tonumber(known) >= batch then
  if tonumber(known) > batch then return {'OLD'} end
  local results = {'OK'}
  for result in string.gmatch(reply, '[^\t]+') do results[#results + 1] = result end
  return results
end

-- Cached data for each member that this call has read: its record, inbox length, and queues.
local records, length, queues, alive = {}, {}, {}, nil
local function member_of(id)
  if records[id] == nil then records[id] = read_member(id) or false end
  return records[id]
end
local function live()
  alive = alive or alive_at(now)
  return alive
end
-- Return a live member's session and the queues that it has declared, each followed by a space.
-- Return false if the member is dead, or if its version of meteor_py declares no queues.
local function declaration(id)
  if queues[id] == nil then
    local declared, m = call('HGET', HANDLERS, id), member_of(id)
    queues[id] = declared and m and match(declared, '^%S+') == m.session and declared or false
  end
  return queues[id]
end
-- Return whether a member has declared its queues, and this queue is not among them.
local function lacks(id, queue)
  local declared = declaration(id)
  return declared and string.find(declared, ' ', 1, true)
    and not string.find(declared, ' ' .. queue .. ' ', 1, true)
end
-- Return whether an inbox is full. To make room, first remove a few messages whose sender has stopped
-- waiting.
local function full(id)
  length[id] = length[id] or call('XLEN', P .. 'inbox:' .. id)
  if length[id] < MAX_INBOX then return false end
  local over = call('ZRANGEBYSCORE', P .. 'awaited:' .. id, '-inf', '(' .. int(now), 'LIMIT', 0, 64)
  for i = 1, #over do
    local place, message = match(over[i], '^(.-) (.*)$')
    local entry = call('XRANGE', P .. 'inbox:' .. id, place, place)[1]
    discard(id, place, entry and pairs_of(entry[2]) or {id = message}, true)
    complete(message, id, 'expired', ':')
  end
  length[id] = call('XLEN', P .. 'inbox:' .. id)
  return length[id] >= MAX_INBOX
end

-- Choose a live member: preferably one that handles the queue and whose inbox has room.
local function choose(queue, random, strict)
  local all, fallback, unhandled = live(), nil, nil
  for i = 0, #all - 1 do
    local id = all[(random + i) % #all + 1]
    if lacks(id, queue) then
      if not unhandled or (full(unhandled) and not full(id)) then unhandled = id end
    elseif not full(id) then
      return {id}
    else
      fallback = fallback or id
    end
  end
  if not fallback and strict and unhandled then return nil, 'NOHANDLER' end
  return {fallback or unhandled}
end
local function everybody(m, strict)
  local all = string.find(m.options, 'd') and call('HKEYS', MEMBERS) or live()
  local target, lacking, self = {}, {}, string.find(m.options, 's') and m.sender
  for _, id in ipairs(all) do
    if id ~= self then
      local handled = not (strict and lacks(id, m.queue))
      local list = handled and target or lacking
      list[#list + 1] = id
    end
  end
  if #target == 0 and #lacking > 0 then return nil, 'NOHANDLER' end
  return target, nil, lacking
end
-- Return the receivers (or nil and a refusal), and the members that do not handle the queue.
local function receivers(m)
  local strict = string.find(m.options, 'h')
  if m.to == 'any' then return choose(m.queue, m.random, strict) end
  if m.to == 'all' then return everybody(m, strict) end
  if m.to == 'leader' and leader == '' then return nil, 'NOLEADER' end
  local id = m.to == 'leader' and leader or m.member
  if not member_of(id) then return nil, 'NOMEMBER' end
  if strict and lacks(id, m.queue) then return nil, 'NOHANDLER' end
  return {id}
end

local work, bytes, stored, longest = 0, 0, false, 0
local function store(m)
  local sender = m.sender ~= '' and member_of(m.sender)
  if m.sender ~= '' and (not sender or sender.session ~= m.session) then return 'STALE' end
  local target, refusal, lacking = receivers(m)
  if not target then return refusal end
  if #target == 0 then return 'NOMEMBER' end
  for _, id in ipairs(target) do
    if full(id) then return 'FULL\n' .. id end
  end
  -- A `tell` is also stored for receivers without a handler: they may register one later.
  if m.verb == 'tell' then
    for _, id in ipairs(lacking or {}) do
      if full(id) then return 'FULL\n' .. id end
      target[#target + 1] = id
    end
    lacking = {}
  end
  local office = sender and leader == m.sender and '1' or '0'
  local sharers = {}
  if #target > 1 and #m.body > LONG then
    for _, id in ipairs(target) do
      if declaration(id) then sharers[#sharers + 1] = id end
    end
  end
  local f = {id = m.id, verb = m.verb, to = m.to, ['until'] = int(now + m.wait)}
  local fields = {'id', m.id, 'queue', m.queue, 'verb', m.verb, 'to', m.to, 'from', m.sender,
                  'leader', office, 'priority', m.priority, 'random', m.random, 'tries', '0',
                  'sent', int(now), 'until', f['until'], 'type', m.type, 'body', m.body}
  local all = table.concat(target, '\n')
  if m.verb ~= 'tell' then
    for _, id in ipairs(lacking or {}) do all = all .. '\n' .. id end
    local key = P .. 'message:' .. m.id
    call('HSET', key, 'from', ARGV[1], 'verb', m.verb, 'need', #target + #(lacking or {}), 'to', all)
    call('PEXPIRE', key, int(m.wait + 60000))
  end
  for _, id in ipairs(target) do
    if #sharers == 0 or not declaration(id) then
      deliver(id, f, fields)
      bytes = bytes + #m.body
    end
    length[id] = length[id] + 1
  end
  if #sharers > 0 then
    call('HSET', P .. 'body:' .. m.id, 'body', m.body, 'holders', #sharers)
    fields[#fields], fields[#fields + 1], fields[#fields + 2] = '', 'shared', '1'
    f.shared = true
    for _, id in ipairs(sharers) do deliver(id, f, fields) end
    bytes = bytes + #m.body
  end
  for _, id in ipairs(lacking or {}) do complete(m.id, id, 'nohandler', ':' .. m.queue) end
  work, stored, longest = work + #target, true, max(longest, m.wait)
  return 'OK\n' .. all
end

local finished = {}
for id in string.gmatch(ARGV[5], '%S+') do finished[#finished + 1] = P .. 'message:' .. id end
if #finished > 0 then call('UNLINK', unpack(finished)) end
local results = {}
for i = FIRST, #ARGV, SIZE do
  results[#results + 1] = store({
    id = ARGV[i], sender = ARGV[i + 1], session = ARGV[i + 2], queue = ARGV[i + 3],
    verb = ARGV[i + 4], to = ARGV[i + 5], member = ARGV[i + 6], random = tonumber(ARGV[i + 7]),
    options = ARGV[i + 8], priority = ARGV[i + 9], wait = tonumber(ARGV[i + 10]),
    type = ARGV[i + 11], body = ARGV[i + 12]})
  if work >= WORK or bytes >= BYTES then break end
end
-- Keep the results for as long as a sender may wait, because a repeat can arrive until then.
if stored then
  call('SET', sent, int(batch) .. '\t' .. table.concat(results, '\t'), 'PX', int(longest + HOUR))
end
return {'OK', unpack(results)}
