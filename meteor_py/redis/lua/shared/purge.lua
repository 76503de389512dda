#!lua flags=allow-oom
-- Settle waiting records of an ordering key, the oldest first, without processing them.
--
-- KEYS  1 meta  2 state  3 groups  4 ready  5 blocked  6 delayed  7 failures  8 suspects
--       9 waiting of the ordering key  10 bell
-- ARGV  1 incarnation of stream and group  2 ordering key  3 the last offset to purge
--       4 prefix of the shared group's keys, from which those of the owner are made
-- Returns {'OK', records purged, 1 if another call is needed}, or
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because no consumer may claim a record that is being purged. Held records are not purged.

local call = redis.call
local found = call('HGET', KEYS[1], 'incarnation')
if found ~= string.match(ARGV[1], '^[^.]*') then
  return {found and 'INCARNATION' or 'NOSTREAM'}
end
local s = call('HMGET', KEYS[2], 'incarnation', 'waiting', 'max_waiting')
if s[1] ~= ARGV[1] and string.match(s[1] or '', '^[^.]*') ~= ARGV[1] then return {'NOGROUP'} end
local key = ARGV[2]
local last, purged = tonumber(ARGV[3]), {}
for _, offset in ipairs(call('LRANGE', KEYS[9], 0, 4095)) do
  if tonumber(offset) > last then break end
  purged[#purged + 1] = offset
end
if #purged == 0 then return {'OK', 0, 0} end
call('LPOP', KEYS[9], #purged)
call('HDEL', KEYS[7], unpack(purged))
call('SREM', KEYS[8], unpack(purged))
call('HINCRBY', KEYS[2], 'waiting', -#purged)
call('HINCRBY', KEYS[2], 'purged', #purged)
if tonumber(s[2]) >= tonumber(s[3]) then  -- consumers may continue scanning
  local bell = call('HINCRBY', KEYS[2], 'bell', 1)
  call('XADD', KEYS[10], 'MAXLEN', '=', 8, string.format('%.0f-0', bell), 'c', '')
end

local owner, waiting, state = string.match(call('HGET', KEYS[3], key), '^(.-):(%d+):(.-):')
local more = ARGV[4] .. 'more:' .. owner
local held = ARGV[4] .. 'held:' .. owner
waiting = tonumber(waiting) - #purged
if waiting > 0 then
  local head = call('LINDEX', KEYS[9], 0)
  for _, set in ipairs({KEYS[4], KEYS[5], more}) do call('ZADD', set, 'XX', head, key) end
  local count = string.format('%.0f', waiting)
  call('HSET', KEYS[3], key, owner .. ':' .. count .. ':' .. state .. ':' .. head)
  return {'OK', #purged, #purged == 4096 and 1 or 0}
end
for _, set in ipairs({KEYS[4], KEYS[5], more}) do call('ZREM', set, key) end
if state == 'd' then
  state = ''
  call('ZREM', KEYS[6], key)
end
if owner ~= '' and call('HGET', held, key) == '' then  -- reserved for a last try that is gone
  call('HDEL', held, key)
  owner = ''
end
local value = state == '' and owner or owner .. ':0:' .. state .. ':'
if value == '' then call('HDEL', KEYS[3], key) else call('HSET', KEYS[3], key, value) end
return {'OK', #purged, #purged == 4096 and 1 or 0}
