#!lua flags=allow-oom
-- Set or delete a group property.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 name  2 'set' or 'delete'  3 value  4 maximum number of properties in a group
-- Returns {'OK', 1 if it was changed, else 0}, or {'NOGROUP'}  {'FULL', properties}
-- Atomic because the change and the event that reports it must happen in one step.

local name, value = ARGV[1], ARGV[3]
local present = call('HGET', PROPERTIES, name)
if ARGV[2] == 'delete' then
  if not present then return {'OK', 0} end
  call('HDEL', PROPERTIES, name)
  emit('property', 'name', name, 'deleted', '1')
  return {'OK', 1}
end
if present == value then return {'OK', 0} end
local count = call('HLEN', PROPERTIES)
if not present and count >= tonumber(ARGV[4]) then return {'FULL', count} end
call('HSET', PROPERTIES, name, value)
emit('property', 'name', name, 'value', value)
return {'OK', 1}
