#!lua flags=allow-oom
-- Join a shared group as a consumer.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 members  4 leases  5 batches of this consumer
-- ARGV  1 incarnation of stream and group  2 consumer, an id of six characters  3 its name
-- Returns {'OK'}  {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'TAKEN'}: another consumer has that id
-- Atomic because two consumers must not have the same id. If the same consumer repeats the call,
-- nothing changes.

local call = redis.call
local found = call('HGET', KEYS[1], 'incarnation')
if found ~= string.match(ARGV[1], '^[^.]*') then return {found and 'INCARNATION' or 'NOSTREAM'} end
local s = call('HMGET', KEYS[2], 'incarnation', 'progress', 'lease_ms')
if s[1] ~= ARGV[1] then return {'NOGROUP'} end
local MEMBER, PROGRESS = '<dddddBBBHc0Hc0I4c0', '<ddddddddddddddddc6c6' -- see shared/_group.lua
local member = call('HGET', KEYS[3], ARGV[2])
if member then
  local fields = {struct.unpack(MEMBER, member)}
  return {fields[1] == 0 and fields[10] == ARGV[3] and 'OK' or 'TAKEN'}
end
if #ARGV[2] ~= 6 or not string.find(ARGV[2], '^[%w_-]+$') or call('EXISTS', KEYS[5]) == 1 then
  return {'TAKEN'}
end
local p, lease = {struct.unpack(PROGRESS, s[2])}, tonumber(s[3])
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local gap = math.max(now - p[5], 0)
p[3], p[4], p[5] = p[3] + gap, p[4] + math.min(gap, math.floor(lease / 2)), now
local deadline = p[4] + lease + math.floor(lease / 8)
p[6] = math.min(p[6], deadline)
call('HSET', KEYS[3], ARGV[2],
     struct.pack(MEMBER, 0, deadline, 0, 1, 0, 0, 0, 0, 0, '', #ARGV[3], ARGV[3], 0, ''))
call('ZADD', KEYS[4], deadline, ARGV[2])
call('HSET', KEYS[2], 'progress', struct.pack(PROGRESS, unpack(p, 1, 18)))
return {'OK'}
