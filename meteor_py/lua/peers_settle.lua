#!lua flags=allow-oom
-- Settle a message: acknowledge it, answer it, or fail it.
--
-- KEYS  1 what the keys of the group begin with
-- ARGV  1 member  2 its session  3 entry in its inbox  4 message  5 ok, or why not: failed, expired,
--       unknown  6 type of the answer  7 answer, or what was wrong
-- Returns {'OK', 1 if it was there, else 0}, or {'NOGROUP'}  {'FENCED'}: the member is somebody else
--   now, and so is the message
-- Atomic because a message is settled once, by who has it.

local m = read_member(ARGV[1])
if not m or m.session ~= ARGV[2] then return {'FENCED'} end
if call('XDEL', P .. 'inbox:' .. ARGV[1], ARGV[3]) == 0 then return {'OK', 0} end
complete(ARGV[4], ARGV[1], ARGV[5], ARGV[6] .. ':' .. ARGV[7])
return {'OK', 1}
