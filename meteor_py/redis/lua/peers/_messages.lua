-- Peer group messages: writes inboxes, replies and dead letters. Needs _members.lua.

-- Size threshold in bytes. A larger body for several receivers is stored once. A larger reply is left
-- out of the notification to the message's sender.
local LONG = 4096

local function pairs_of(flat)
  local f = {}
  for i = 1, #flat, 2 do f[flat[i]] = flat[i + 1] end
  return f
end

-- Return the live members that can get new work. This excludes members that are overdue but not yet
-- swept, and members that are about to leave.
local function alive_at(now, most)
  local leaving = call('ZCARD', LEAVING)
  local all = call('ZRANGEBYSCORE', DEADLINES, int(now), '+inf', 'LIMIT', 0,
                   int(most and most + leaving or -1))
  if leaving == 0 then return all end
  local here = {}
  for _, id in ipairs(all) do
    if not call('ZSCORE', LEAVING, id) then here[#here + 1] = id end
  end
  return here
end

-- Store a receiver's reply; the last reply notifies the sender. A sender that waits for one receiver
-- finds a short reply in the notification itself.
local notified = {}
local function complete(id, member, code, value)
  local key, reply = P .. 'message:' .. id, code .. ':' .. value
  local m = call('HMGET', key, 'from', 'verb', 'need')
  if not m[3] then return end
  local single = m[3] == '1'
  if single then
    if call('HSET', key, 'r:' .. member, reply, 'got', 1) < 2 then return end
  else
    if call('HSETNX', key, 'r:' .. member, reply) == 0 then return end
    if call('HINCRBY', key, 'got', 1) ~= tonumber(m[3]) then return end
  end
  if m[2] == 'tell' then return end
  local replies = P .. 'replies:' .. m[1]
  if single and #reply <= LONG then
    call('XADD', replies, 'MAXLEN', '~', 10000, '*', 'id', id, 'member', member, 'reply', reply)
  else
    call('XADD', replies, 'MAXLEN', '~', 10000, '*', 'id', id)
  end
  if not notified[replies] then
    notified[replies] = true
    call('PEXPIRE', replies, HOUR)
  end
end

-- Each inbox has indexes, so that no script has to scan large messages. 'movable' lists the messages
-- sent to 'any', in order. 'awaited' lists the messages that a sender waits for, by deadline. 'shared'
-- lists the messages whose body is in 'body:<id>', where several receivers share it.
local function deliver(member, f, fields)
  local place = call('XADD', P .. 'inbox:' .. member, '*', unpack(fields))
  if f.to == 'any' then
    call('ZADD', P .. 'movable:' .. member, int(call('HINCRBY', STATE, 'moves', 1)), place)
  end
  if f.verb ~= 'tell' then
    call('ZADD', P .. 'awaited:' .. member, f['until'], place .. ' ' .. f.id)
  end
  if f.shared then call('ZADD', P .. 'shared:' .. member, 0, f.id) end
end
local function release_body(id)
  local key = P .. 'body:' .. id
  if call('HINCRBY', key, 'holders', -1) <= 0 then call('UNLINK', key) end
end
-- Remove a message from an inbox. Set 'begun' if the message's deliveries may have been counted.
local function discard(member, place, f, begun)
  call('XDEL', P .. 'inbox:' .. member, place)
  if f.to == 'any' then call('ZREM', P .. 'movable:' .. member, place) end
  if f.verb ~= 'tell' then call('ZREM', P .. 'awaited:' .. member, place .. ' ' .. f.id) end
  if begun then call('HDEL', P .. 'begun:' .. member, place) end
  if f.shared and call('ZREM', P .. 'shared:' .. member, f.id) == 1 then release_body(f.id) end
end
-- Add a dead letter. Call it before 'discard', which may delete a shared body.
local function bury(member, reason, fields, f)
  local letter = {}
  for i = 1, #fields, 2 do
    local name, value = fields[i], fields[i + 1]
    if name == 'body' and f.shared then value = call('HGET', P .. 'body:' .. f.id, 'body') or '' end
    letter[i], letter[i + 1] = name, value
  end
  call('XADD', P .. 'dead', 'MAXLEN', '~', 1000, '*', 'member', member, 'reason', reason,
       unpack(letter))
end
