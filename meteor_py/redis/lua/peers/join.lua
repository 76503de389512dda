#!lua flags=allow-oom
-- Join a peer group, or rejoin it under a name.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 id  2 session  3 '1' if persistent  4 priority  5 metadata
--       6 what to do if a live member has the name: 'takeover' or 'fail'
--       7 maximum number of members in a group
-- Returns {'OK', index, ms left on the lease, the last entry in the member's inbox: this session gets
--   all entries up to that entry again}, or {'NOGROUP'}  {'FULL', members}
--   {'TAKEN', session}: another member has that id, and this call may not take it over
-- Atomic because joining, the event that reports it, and any election that it makes possible must
-- happen in one step.

local id, sid, persistent, priority, metadata = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local m = read_member(id)
local function last_entry()
  local entry = m and call('XREVRANGE', P .. 'inbox:' .. id, '+', '-', 'COUNT', 1)[1]
  return entry and entry[1] or '0-0'
end
if m and m.session == sid and m.alive == '1' then  -- a repeat: the reply was lost
  renew(id)
  return {'OK', tonumber(m.index), TTL, last_entry()}
end
if m and (m.persistent == '0' or persistent == '0' or (m.alive == '1' and ARGV[6] ~= 'takeover')) then
  return {'TAKEN', m.session}
end
local size = call('HLEN', MEMBERS)
if not m and size >= tonumber(ARGV[7]) then return {'FULL', size} end
local index = call('HINCRBY', STATE, 'joins', 1)
local joined = m and m.joined or int(now)
write_member(id, {index = int(index), session = sid, persistent = persistent, alive = '1',
                  priority = priority, joined = joined, metadata = metadata})
renew(id)
call('ZADD', CANDIDATES, int(-priority * 1e12 + index), id)
call('ZREM', LEAVING, id)
call('ZREM', EXPIRATIONS, id)
call('ZREM', ORPHANS, id)
call('HSET', HANDLERS, id, sid)
call('ZREM', P .. 'removed', id)
emit(m and 'alive' or 'joined', 'member', id, 'session', sid, 'index', int(index),
     'persistent', persistent, 'priority', priority, 'joined', joined, 'metadata', metadata)
if leader == id then depose('taken over') end
succeed()
-- While no other member was alive, dead members kept the messages that were sent to 'any'. Hand these
-- messages over.
if call('HDEL', STATE, 'stranded') == 1 then
  for _, one in ipairs(call('HKEYS', MEMBERS)) do
    if read_member(one).alive == '0' then orphan(one) end
  end
end
return {'OK', index, TTL, last_entry()}
