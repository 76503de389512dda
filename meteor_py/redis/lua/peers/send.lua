#!lua
-- Store a message in the inboxes of its receivers.
--
-- KEYS  1 the prefix of the keys of the group
-- ARGV  1 id  2 session that gets the replies  3 id of the sender, '' if it is not a member
--       4 queue  5 verb: tell, send or ask  6 to: member, any, all or leader  7 member, for that
--       8 a random number  9 '1' to include dead members  10 priority  11 messages that an inbox
--       may hold  12 ms after which the sender stops waiting  13 type of the body  14 body
--       15 the sender's session, if it is a member  16 ids of finished messages of the handle
-- Returns {'OK', receivers...}, or {'NOGROUP'}  {'NOMEMBER'}  {'NOLEADER'}  {'FULL', member}
--   {'STALE'}: the sender is no longer that member
-- Atomic because all receivers get it or none, and a receiver that leaves later is known to have got
-- it. Idempotent per id: a repeat after a lost reply changes nothing. Refused if the server is full.

local key, to, target = P .. 'message:' .. ARGV[1], ARGV[6], {}
local known = call('HGET', key, 'to')
if known then
  for id in string.gmatch(known, '[^\n]+') do target[#target + 1] = id end
  return {'OK', unpack(target)}
end

-- Whether an inbox is full. Messages whose sender stopped waiting make room, a few per call.
local function full(id)
  local inbox, most = P .. 'inbox:' .. id, tonumber(ARGV[11])
  if call('XLEN', inbox) < most then return false end
  local awaited = P .. 'awaited:' .. id
  local over = call('ZRANGEBYSCORE', awaited, '-inf', '(' .. int(now), 'LIMIT', 0, 64)
  for i = 1, #over do
    local place, message = match(over[i], '^(.-) (.*)$')
    discard(id, place, message)
    complete(message, id, 'expired', ':')
  end
  return call('XLEN', inbox) >= most
end

local sender = ARGV[3] ~= '' and read_member(ARGV[3])
if ARGV[3] ~= '' and (not sender or sender.session ~= ARGV[15]) then return {'STALE'} end
for id in string.gmatch(ARGV[16], '%S+') do call('UNLINK', P .. 'message:' .. id) end
if to == 'member' then
  if read_member(ARGV[7]) then target = {ARGV[7]} end
elseif to == 'leader' then
  if leader == '' then return {'NOLEADER'} end
  target = {leader}
elseif to == 'any' then
  local all = alive()
  for i = 0, #all - 1 do  -- prefer an inbox with room
    target = {all[(ARGV[8] + i) % #all + 1]}
    if not full(target[1]) then break end
  end
else
  target = ARGV[9] == '1' and call('HKEYS', MEMBERS) or alive()
end
if #target == 0 then return {'NOMEMBER'} end

for _, id in ipairs(target) do
  if full(id) then return {'FULL', id} end
end
call('HSET', key, 'from', ARGV[2], 'verb', ARGV[5], 'need', #target, 'to', table.concat(target, '\n'))
call('PEXPIRE', key, int(ARGV[12] + 60000))
local office = sender and leader == ARGV[3] and '1' or '0'
local fields = {'id', ARGV[1], 'queue', ARGV[4], 'verb', ARGV[5], 'to', to, 'from', ARGV[3],
                'leader', office, 'priority', ARGV[10], 'random', ARGV[8], 'tries', '0',
                'sent', int(now), 'until', int(now + ARGV[12]), 'type', ARGV[13], 'body', ARGV[14]}
local f = pairs_of(fields)
for _, id in ipairs(target) do deliver(id, f, fields) end
return {'OK', unpack(target)}
