#!lua flags=allow-oom
-- Do one of four things: change a member's metadata; declare the queues that it handles; end its
-- leadership and move it to the end of the election order; or stop giving it new work, because it will
-- leave as soon as its current work is done.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 id  2 session  3 'metadata', 'handlers', 'resign' or 'leave'  4 metadata, or the queues with a
--       space after each, or the term that ends
--       5 the highest term that the member knows of, if it resigns: the next term is higher
-- Returns {'OK', 1 if something was changed, else 0}, or {'NOGROUP'}  {'FENCED'}: another session
--   now owns the member
-- Atomic because the step that ends a member's leadership must also elect its successor.

local id = ARGV[1]
local m = read_member(id)
if not m or m.session ~= ARGV[2] then return {'FENCED'} end
if ARGV[3] == 'metadata' then
  m.metadata = ARGV[4]
  write_member(id, m)
  emit('updated', 'member', id, 'metadata', ARGV[4])
  return {'OK', 1}
end
if ARGV[3] == 'handlers' then
  call('HSET', HANDLERS, id, ARGV[2] .. ' ' .. ARGV[4])
  return {'OK', 1}
end
if ARGV[3] == 'leave' then
  call('ZADD', LEAVING, int(now), id)
  call('ZREM', CANDIDATES, id)
  unseat(id)
  return {'OK', 1}
end
if leader ~= id or int(term) ~= ARGV[4] then return {'OK', 0} end
m.index = int(call('HINCRBY', STATE, 'joins', 1))
write_member(id, m)
if not call('ZSCORE', LEAVING, id) then
  call('ZADD', CANDIDATES, int(-m.priority * 1e12 + m.index), id)
end
depose('resigned', 'index', m.index)
term = max(term, tonumber(ARGV[5]))
succeed(id)
return {'OK', 1}
