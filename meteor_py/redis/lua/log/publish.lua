-- Append one frame to the log, exactly once per (producer, epoch, sequence).
--
-- KEYS  1 log  2 meta  3 producer  4 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown
--       3 producer epoch  4 sequence  5 number of records  6 fingerprint of the payload
--       7 lifetime of the producer key, ms  8 format of the frame  9 payload  10 crc32, '' for none
--       11... with an index: its entry (see grouping.py)
-- Returns {'OK', first offset, epoch of the stream}, or what kept it from being written:
--   {'NOSTREAM'}  {'INCARNATION'}  {'HISTORY', history in meta}  {'STALEPRODUCER', epoch there}
--   {'NOPRODUCER'}  {'OUTOFSEQ', sequence expected}  {'FULL', archived}  {'EXHAUSTED'}
-- Atomic because the offset, the frame under it and the memory of having done it must agree.
-- No '#!lua' line, on purpose: in a server that is out of memory the script then still runs, so a
-- repeat gets its first answer, and a new frame fails at XADD, its first write, leaving nothing.

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'history', 'epoch', 'next', 'appended',
                     'capacity', 'archived', 'max_unarchived')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', m[2]} end

local format = string.format
local epoch, seq, n = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local slot = format('%.0f', seq % 8)
local p = redis.call('HMGET', KEYS[3], 'epoch', 'last', slot)
local known = p[1] and tonumber(p[1])
if not known then
  if seq ~= 0 then return {'NOPRODUCER'} end
elseif epoch < known then
  return {'STALEPRODUCER', known}
elseif epoch > known then
  if seq ~= 0 then return {'OUTOFSEQ', 0} end
elseif seq ~= tonumber(p[2]) + 1 then
  local s, first, count, fingerprint = string.match(p[3] or '', '^(%d+):(%d+):(%d+):(%d+)$')
  if s ~= ARGV[4] or count ~= ARGV[5] or fingerprint ~= ARGV[6] then
    return {'OUTOFSEQ', tonumber(p[2]) + 1}
  end
  -- The write moves this connection's replication offset past the frame's: WAIT then means it.
  redis.call('PEXPIRE', KEYS[3], ARGV[7])
  return {'OK', tonumber(first), tonumber(m[3])}
end

local first = tonumber(m[4])
local after = first + n
if after > 9007199254740991 then return {'EXHAUSTED'} end
local floor = after - tonumber(m[6])
if m[7] then
  -- Not if nothing waits: there would be nothing to wait for.
  if after - tonumber(m[7]) > tonumber(m[8]) and tonumber(m[7]) < first then
    return {'FULL', tonumber(m[7])}
  end
  floor = math.min(floor, tonumber(m[7]))
end

local clock = redis.call('TIME')
local now = format('%.0f', math.max(clock[1] * 1000 + math.floor(clock[2] / 1000), tonumber(m[5])))
local minid = format('%.0f-0', math.max(floor, 0))
local id = format('%.0f-', after - 1) .. ARGV[5]
if ARGV[10] == '' then
  redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, ARGV[8], ARGV[9])
else
  redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, ARGV[8], ARGV[9], 'crc', ARGV[10])
end
if KEYS[4] then redis.call('XADD', KEYS[4], 'MINID', '=', minid, id, unpack(ARGV, 11)) end
redis.call('HSET', KEYS[2], 'next', format('%.0f', after), 'appended', now)
if known and epoch > known then redis.call('DEL', KEYS[3]) end
redis.call('HSET', KEYS[3], 'epoch', ARGV[3], 'last', ARGV[4],
           slot, format('%s:%.0f:%s:%s', ARGV[4], first, ARGV[5], ARGV[6]))
redis.call('PEXPIRE', KEYS[3], ARGV[7])
return {'OK', first, tonumber(m[3])}
