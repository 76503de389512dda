#!lua flags=allow-oom
-- Write a guarded value if the writer still leads in its term.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 term  2 session  3 'set' or 'delete'  4 name  5 value
-- Returns {'OK'}, or {'NOGROUP'}  {'STALE', current term}
-- Atomic because another member could be elected between the check and the write.

if int(term) ~= ARGV[1] or session ~= ARGV[2] then return {'STALE', term} end
if ARGV[3] == 'set' then
  call('HSET', P .. 'guarded', ARGV[4], ARGV[5])
else
  call('HDEL', P .. 'guarded', ARGV[4])
end
return {'OK'}
