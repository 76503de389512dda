#!lua flags=allow-oom
-- Delete a peer group and its keys, except those of messages and closed polls.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 'force' to delete it even if it has live members  2... keys named after members and sessions
-- Returns {'OK'}, or {'NOGROUP'}  {'ALIVE', number of live members}
-- Atomic because a member must not join in between. The caller deletes the keys of messages and closed
-- polls afterwards.

local members = call('ZCARD', DEADLINES)
if members > 0 and ARGV[1] ~= 'force' then return {'ALIVE', members} end
for _, ids in ipairs({call('HKEYS', MEMBERS), call('ZRANGE', ORPHANS, 0, -1)}) do
  for _, id in ipairs(ids) do
    call('UNLINK', P .. 'inbox:' .. id, P .. 'movable:' .. id, P .. 'awaited:' .. id,
         P .. 'shared:' .. id, P .. 'begun:' .. id)
  end
end
for _, id in ipairs(call('ZRANGE', POLLS, 0, -1)) do
  call('DEL', P .. 'poll:' .. id, P .. 'votes:' .. id)
end
for i = 2, #ARGV do call('UNLINK', ARGV[i]) end
for _, part in ipairs({'guarded', 'removed', 'dead', 'config'}) do call('DEL', P .. part) end
call('DEL', STATE, MEMBERS, DEADLINES, EXPIRATIONS, CANDIDATES, LEAVING, EVENTS, POLLS, LIMITS,
     PENDING, AGENDA, GRACED, ORPHANS, HANDLERS, PROPERTIES)
return {'OK'}
