#!lua flags=allow-oom
-- Settle messages: acknowledge them, reply to them, or fail them. Also count deliveries of messages
-- that one of the member's earlier sessions may have begun to handle.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 member  2 its session
--       3... six arguments for each message:
--         operation: settle, settle-begun (an earlier begin may have counted its deliveries), or begin
--         entry in the inbox
--         message id
--         settle: the result, which is ok, failed, expired, or unknown (the member cannot decode the
--           message, which becomes a dead letter). begin: a token; a retry after a lost reply sends the
--           same one
--         settle: type of the reply. begin: unused
--         settle: the reply, or the reason of the failure. begin: unused
-- Returns {'OK', a result for each message...}, or {'NOGROUP'}  {'FENCED'}: another session now owns the
--   member and its messages. A result is 0 if the message is not in the inbox. Otherwise, it is 1 if the
--   message was settled. For begin, it is the delivery count, including this delivery, or -1 if the
--   message had already been delivered max_deliveries times and became a dead letter.
-- Atomic because a message must be settled only once, by the session that owns the member.

local FIRST, SIZE = 3, 6
local config = call('HMGET', CONFIG, 'ttl', 'max_deliveries')
if not config[1] or call('HEXISTS', STATE, 'life') == 0 then return {'NOGROUP'} end
local MAX_DELIVERIES = tonumber(config[2] or 5)
local member = ARGV[1]
local m = read_member(member)
if not m or m.session ~= ARGV[2] then return {'FENCED'} end

local function begin(place, fields, f, token)
  local counts = P .. 'begun:' .. member
  local here, last = match(call('HGET', counts, place) or '0 ', '^(%d+) (.*)$')
  if last ~= token then
    here = here + 1
    call('HSET', counts, place, int(here) .. ' ' .. token)
  end
  local count = (tonumber(f.deliveries) or 1) + here
  if MAX_DELIVERIES == 0 or count <= MAX_DELIVERIES then return count end
  bury(member, 'it was delivered ' .. MAX_DELIVERIES .. ' times and never settled', fields, f)
  discard(member, place, f, true)
  complete(f.id, member, 'poison', ':' .. MAX_DELIVERIES)
  return -1
end
local function handle(i)
  local what, place, id = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local entry = call('XRANGE', P .. 'inbox:' .. member, place, place)[1]
  if not entry then return 0 end
  local fields = entry[2]
  local f = pairs_of(fields)
  -- After a failover, another message may have a lost message's position.
  if f.id ~= id then return 0 end
  if what == 'begin' then return begin(place, fields, f, ARGV[i + 3]) end
  if ARGV[i + 3] == 'unknown' then bury(member, ARGV[i + 5], fields, f) end
  discard(member, place, f, what == 'settle-begun')
  complete(id, member, ARGV[i + 3], ARGV[i + 4] .. ':' .. ARGV[i + 5])
  return 1
end

local results = {'OK'}
for i = FIRST, #ARGV, SIZE do results[#results + 1] = handle(i) end
return results
