#!lua flags=allow-oom
-- Settle a message: acknowledge it, reply to it, or fail it.
--
-- KEYS  1 the prefix of the keys of the group
-- ARGV  1 member  2 its session  3 entry in its inbox  4 message  5 ok, failed, expired, or unknown: it
--       cannot be decoded and becomes a dead letter  6 type of the reply  7 reply, or the reason
-- Returns {'OK', 1 if it was there, else 0}, or {'NOGROUP'}  {'FENCED'}: another session has the
--   member and its messages now
-- Atomic because a message is settled once, by the session that has it.

local m = read_member(ARGV[1])
if not m or m.session ~= ARGV[2] then return {'FENCED'} end
local inbox = P .. 'inbox:' .. ARGV[1]
local entry = call('XRANGE', inbox, ARGV[3], ARGV[3])[1]
if not entry then return {'OK', 0} end
local fields = entry[2]
for i = 1, #fields, 2 do
  -- After a failover, another message may have the position of a lost one.
  if fields[i] == 'id' and fields[i + 1] ~= ARGV[4] then return {'OK', 0} end
end
discard(ARGV[1], ARGV[3], ARGV[4])
if ARGV[5] == 'unknown' then bury(ARGV[1], ARGV[7], fields) end
complete(ARGV[4], ARGV[1], ARGV[5], ARGV[6] .. ':' .. ARGV[7])
return {'OK', 1}
