#!lua flags=allow-oom
-- Put something to the vote of all who are alive now.
--
-- KEYS  1 what the keys of the group begin with
-- ARGV  1 poll  2 kind: majority, consensus, or a number of votes  3 ms to vote in  4 when it is to be
--       done, by the server's clock in ms, '' if there is no such time  5 ms that must lie between
--       the vote and that  6 name of the action, '' for none  7 topic  8 who proposes
--       9 '1' if there must be a leader
-- Returns {'OK', end of the vote, voters}, or {'NOGROUP'}  {'NOLEADER'}  {'NOMEMBER'}
--   {'TOOLATE', ms by the server's clock}  {'PENDING', poll}: that action is decided on already
-- Atomic because who may vote is decided once.

local key = P .. 'poll:' .. ARGV[1]
local known = call('HMGET', key, 'until', 'voters')
if known[1] then return {'OK', tonumber(known[1]), tonumber(known[2])} end
if ARGV[9] == '1' and leader == '' then return {'NOLEADER'} end
local voters = alive()
if #voters == 0 then return {'NOMEMBER'} end
local limit = ARGV[4] ~= '' and ARGV[4] - ARGV[5]
if limit and limit <= now then return {'TOOLATE', now} end
if ARGV[6] ~= '' then
  local pending, at = match(call('HGET', P .. 'pending', ARGV[6]) or '', '^(.-):(%d+)$')
  if pending and tonumber(at) > now and call('HGET', P .. 'poll:' .. pending, 'result') ~= 'no' then
    return {'PENDING', pending}
  end
  call('HSET', P .. 'pending', ARGV[6], ARGV[1] .. ':' .. ARGV[4])
end
local quorum = tonumber(ARGV[2])
if not quorum then quorum = ARGV[2] == 'consensus' and #voters or math.floor(#voters / 2) + 1 end
local ends = min(now + ARGV[3], limit or math.huge)
call('HSET', key, 'quorum', int(quorum), 'until', int(ends), 'voters', #voters, 'topic', ARGV[7],
     'at', ARGV[4], 'by', ARGV[8], 'name', ARGV[6])
for _, id in ipairs(voters) do call('HSET', P .. 'votes:' .. ARGV[1], id, '-') end
call('ZADD', POLLS, int(ends), ARGV[1])
if limit then call('ZADD', LIMITS, int(limit), ARGV[1]) end
emit('proposed', 'poll', ARGV[1], 'topic', ARGV[7], 'when', ARGV[4], 'name', ARGV[6], 'by', ARGV[8],
     'until', int(ends), 'quorum', int(quorum))
if quorum > #voters then count(ARGV[1]) end
return {'OK', ends, #voters}
