#!lua flags=allow-oom
-- Settle waiting records of an ordering key, the oldest first, without processing them.
--
-- KEYS  1 meta of the stream  2 meta of the group  3 keys  4 waiting  5 ready  6 blocked  7 delayed
--       8 failures  9 idle  10 purges
-- ARGV  1 incarnation of the stream, with or without that of the group  2 ordering key
--       3 prefix of the group's keys, to build the names of its consumers' keys
--       4 the offset after the last one to purge. Records that are not scanned yet are purged when a
--         step scans them.
-- Returns {'OK', number of records purged, 1 if another call is needed, next offset to scan, the offset
--   before which earlier calls have requested a purge}, or
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because no consumer may claim a record that is being purged. Held records are not purged.
-- Repeating a call after a lost reply is harmless.

local key, call, upto = ARGV[2], redis.call, tonumber(ARGV[4])
local EXTENDED = '<Bc6HBdddddd' -- see shared/_keys.lua
local FREE, DELAYED, BEHIND, MOST = 0, 1, 3, 1024
local before = call('ZSCORE', KEYS[10], key) or 0
if upto > p.next then
  p.purging = p.purging + call('ZADD', KEYS[10], 'GT', upto, key)
end
local raw, purged, more = call('HGET', KEYS[3], key), {}, 0
if raw then
  local t, line
  if string.byte(raw) == 255 then
    t = {struct.unpack(EXTENDED, raw)}
    line = string.sub(raw, t[11])
  else
    t = {255, string.sub(raw, 1, 6), struct.unpack('<H', raw, 7), FREE, -1, -1, -1, 0, -1, 0}
    line = string.sub(raw, 9)
  end
  local at = 1
  while at <= #line and #purged < MOST do
    local o, after = struct.unpack('<I7', line, at)
    if o >= upto then break end
    purged[#purged + 1], at = o, after
    if at > #line and t[10] > 0 then
      local field = key .. ':' .. string.format('%.0f', t[8])
      line, at = call('HGET', KEYS[4], field) or '', 1
      call('HDEL', KEYS[4], field)
      t[8], t[10] = t[8] + 1, t[10] - #line / 7
    end
  end
  line = string.sub(line, at)
  more = line ~= '' and #purged >= MOST and struct.unpack('<I7', line) < upto and 1 or 0
  if #purged > 0 then
    local owner, held = t[2], t[3]
    if line == '' then
      call('ZREM', KEYS[5], key)
      call('ZREM', KEYS[6], key)
      if t[4] == DELAYED then call('ZREM', KEYS[7], key) end
      if t[4] == DELAYED or t[4] == BEHIND then t[4] = FREE end
    else
      local head = struct.unpack('<I7', line)
      for set = 5, 6 do call('ZADD', KEYS[set], 'XX', head, key) end
    end
    -- An owner that holds no records has reserved the key for a record's last delivery attempt.
    if held == 0 and owner ~= NOBODY and line == '' then owner = NOBODY end
    t[2] = owner
    local plain = t[4] == FREE and t[5] < 0 and t[6] < 0 and t[10] <= 0
    if held == 0 and line == '' and t[4] == FREE then
      call('HDEL', KEYS[3], key)
    elseif plain then
      call('HSET', KEYS[3], key, owner .. struct.pack('<H', held) .. line)
    else
      call('HSET', KEYS[3], key, struct.pack(EXTENDED, unpack(t, 1, 10)) .. line)
    end
    if p.failing > 0 then
      local fields = {}
      for i = 1, #purged do fields[i] = string.format('%.0f', purged[i]) end
      p.failing = p.failing - call('HDEL', KEYS[8], unpack(fields))
    end
    p.waiting, p.purged = p.waiting - #purged, p.purged + #purged
  end
end
write_progress()
-- The purge has made room for more waiting records, so a consumer can scan again.
if #purged > 0 then wake(KEYS[9], call('ZRANGE', KEYS[9], 0, 0)[1]) end
return {'OK', #purged, more, string.format('%.0f', p.next), string.format('%.0f', before)}
