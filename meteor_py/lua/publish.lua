-- Append one frame to the log, exactly once per (producer, epoch, sequence).
--
-- KEYS  1 log  2 meta  3 producer
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown
--       3 producer epoch  4 sequence  5 number of records  6 fingerprint of the payload
--       7 lifetime of the producer key, ms  8 format of the frame  9 payload  10 crc32, '' for none
-- Returns {'OK', first offset, epoch of the stream}, or what kept it from being written:
--   {'NOSTREAM'}  {'INCARNATION'}  {'HISTORY', history in meta}  {'STALEPRODUCER', epoch there}
--   {'NOPRODUCER'}  {'OUTOFSEQ', sequence expected}  {'FULL', archived}  {'EXHAUSTED'}
-- Atomic because the offset, the frame under it and the memory of having done it must agree.
-- No '#!lua' line, on purpose: in a server that is out of memory the script then still runs, so a
-- repeat gets its first answer, and a new frame fails at XADD, its first write, leaving nothing.

local function int(x) return string.format('%.0f', x) end

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'history', 'epoch', 'next', 'appended',
                     'capacity', 'archived', 'max_unarchived')
if not m[1] then return {'NOSTREAM'} end
if m[1] ~= ARGV[1] then return {'INCARNATION'} end
if ARGV[2] ~= '' and ARGV[2] ~= m[2] then return {'HISTORY', m[2]} end

local epoch, seq, n = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local slot = int(seq % 8)
local p = redis.call('HMGET', KEYS[3], 'epoch', 'last', slot)
local known = p[1] and tonumber(p[1])
local batch = ARGV[4] .. ':%d+:' .. ARGV[5] .. ':' .. ARGV[6]
if not known then
  if seq ~= 0 then return {'NOPRODUCER'} end
elseif epoch < known then
  return {'STALEPRODUCER', known}
elseif epoch > known then
  if seq ~= 0 then return {'OUTOFSEQ', 0} end
elseif p[3] and string.find(p[3], '^' .. batch .. '$') then
  -- The write moves this connection's replication offset past the frame's: WAIT then means it.
  redis.call('PEXPIRE', KEYS[3], ARGV[7])
  return {'OK', tonumber(string.match(p[3], '^%d+:(%d+)')), tonumber(m[3])}
elseif seq ~= tonumber(p[2]) + 1 then
  return {'OUTOFSEQ', tonumber(p[2]) + 1}
end

local first = tonumber(m[4])
local after = first + n
if after > 9007199254740991 then return {'EXHAUSTED'} end
local floor = after - tonumber(m[6])
if m[7] then
  if after - tonumber(m[7]) > tonumber(m[8]) then return {'FULL', tonumber(m[7])} end
  floor = math.min(floor, tonumber(m[7]))
end

local clock = redis.call('TIME')
local now = math.max(clock[1] * 1000 + math.floor(clock[2] / 1000), tonumber(m[5]))
local entry = {'XADD', KEYS[1]}
if floor > 0 then
  entry[3], entry[4], entry[5] = 'MINID', '=', int(floor) .. '-0'
end
entry[#entry + 1] = int(after - 1) .. '-' .. ARGV[5]
entry[#entry + 1] = 't'
entry[#entry + 1] = int(now)
entry[#entry + 1] = ARGV[8]
entry[#entry + 1] = ARGV[9]
if ARGV[10] ~= '' then
  entry[#entry + 1] = 'crc'
  entry[#entry + 1] = ARGV[10]
end
redis.call(unpack(entry))
redis.call('HSET', KEYS[2], 'next', int(after), 'appended', int(now))
if known and epoch > known then redis.call('DEL', KEYS[3]) end
redis.call('HSET', KEYS[3], 'epoch', ARGV[3], 'last', ARGV[4],
           slot, ARGV[4] .. ':' .. int(first) .. ':' .. ARGV[5] .. ':' .. ARGV[6])
redis.call('PEXPIRE', KEYS[3], ARGV[7])
return {'OK', first, tonumber(m[3])}
