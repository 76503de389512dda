#!lua flags=allow-oom
-- Ask all live members to vote on a proposal.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 poll  2 rule: majority, consensus, or a number of votes  3 ms left to vote  4 when the action
--       is due, in ms on the server's clock, '' for no action  5 ms between the end of the vote and the
--       action  6 name of the action, '' for none  7 topic  8 the proposing member, '' for none
--       9 its session  10 '1' if there must be a leader until the vote ends
--       11 maximum error of a voter's clock in us, '' for any
-- Returns {'OK', ms until the end of the vote, voters}, or {'NOGROUP'}  {'NOLEADER'}  {'NOMEMBER'}
--   {'FENCED'}: another session now owns the proposing member  {'FULL', open votes}
--   {'TOOLATE', ms on the server's clock}  {'PENDING', poll}: that action is already pending
-- Atomic because the voters must be chosen once. Idempotent per poll: a repeat after a lost reply
-- changes nothing.

local key = P .. 'poll:' .. ARGV[1]
local known = call('HMGET', key, 'until', 'voters')
if known[1] then return {'OK', max(tonumber(known[1]) - now, 0), tonumber(known[2])} end
local by = ARGV[8] ~= '' and read_member(ARGV[8])
if ARGV[8] ~= '' and not (by and by.session == ARGV[9]) then return {'FENCED'} end
if ARGV[10] == '1' and leader == '' then return {'NOLEADER'} end
local voters = alive()
if #voters == 0 then return {'NOMEMBER'} end
-- The number of open polls is limited, because the script that drops a member updates all of them.
local open = call('ZCARD', POLLS)
if open >= 100 then return {'FULL', open} end
local limit = ARGV[4] ~= '' and ARGV[4] - ARGV[5]
if limit and limit <= now then return {'TOOLATE', now} end
if ARGV[6] ~= '' then
  prune()
  local pending, at = match(call('HGET', PENDING, ARGV[6]) or '', '^(.-):(%d+)$')
  if pending and tonumber(at) > now then return {'PENDING', pending} end
  call('HSET', PENDING, ARGV[6], ARGV[1] .. ':' .. ARGV[4])
  call('ZADD', AGENDA, ARGV[4], ARGV[6])
  local keep = int(max(call('PTTL', PENDING), ARGV[4] - now + HOUR))
  call('PEXPIRE', PENDING, keep)
  call('PEXPIRE', AGENDA, keep)
end
local quorum = tonumber(ARGV[2])
if not quorum then quorum = ARGV[2] == 'consensus' and #voters or math.floor(#voters / 2) + 1 end
local ends = min(now + ARGV[3], limit or math.huge)
call('HSET', key, 'rule', ARGV[2], 'quorum', int(quorum), 'until', int(ends), 'voters', #voters,
     'yes', 0, 'open', #voters,
     'topic', ARGV[7], 'when', ARGV[4], 'by', ARGV[8], 'name', ARGV[6], 'error', ARGV[11],
     'led', ARGV[10])
for _, id in ipairs(voters) do call('HSET', P .. 'votes:' .. ARGV[1], id, '-') end
call('ZADD', POLLS, int(ends), ARGV[1])
due_at(ends)
if limit then call('ZADD', LIMITS, int(limit), ARGV[1]) end
emit('proposed', 'poll', ARGV[1], 'rule', ARGV[2], 'quorum', int(quorum), 'until', int(ends),
     'topic', ARGV[7], 'when', ARGV[4], 'name', ARGV[6], 'by', ARGV[8], 'error', ARGV[11])
if quorum > #voters then decide(ARGV[1], 'no', 'rejected') end
return {'OK', ends - now, #voters}
