-- Append one frame to the log, exactly once per (producer, epoch, sequence).
--
-- KEYS  1 log  2 meta  3 producer  4 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown
--       3 producer epoch  4 sequence  5 number of records  6 fingerprint of the payload
--       7 lifetime of the producer key, ms; '' keeps the current one
--       8 format of the frame  9 payload  10 crc32, '' for none
--       11 epoch of the stream as the sender knows it, '' if unknown
--       12... with an index: the frame's index entries (see records/ordering_index.py)
-- Returns the first offset if ARGV[11] is the current epoch, else {'OK', first offset, current epoch};
-- or the reason why the frame was not written:
--   {'NOSTREAM'}  {'INCARNATION'}  {'HISTORY', history in meta}  {'STALEPRODUCER', current epoch}
--   {'NOPRODUCER'}  {'OUTOFSEQ', sequence expected}  {'FULL', archived}  {'EXHAUSTED'}
--   {'INVALID'}: the number of records is not between 1 and 99,999, the index entries do not match
--     it, or a new producer or producer epoch has no lifetime
--   {'ORDERED', ordering key}: the stream now has an ordering key, and the index entries are missing
-- Atomic because the offset, its frame and the producer's state must agree.
-- There is no '#!lua' line, so that the script also runs on a server that is out of memory. On such
-- a server, a retry gets the original reply again. A new frame fails at XADD, the first write, and
-- changes nothing.

local seq = tonumber(ARGV[4])
local slot = format('%d', seq % 8)
local p = call('HMGET', KEYS[3], 'epoch', 'last', slot)
local known = p[1]
if known ~= ARGV[3] then
  if known and tonumber(ARGV[3]) <= tonumber(known) then return {'STALEPRODUCER', tonumber(known)} end
  if seq ~= 0 then return known and {'OUTOFSEQ', 0} or {'NOPRODUCER'} end
  if ARGV[7] == '' then return {'INVALID'} end
elseif seq ~= tonumber(p[2]) + 1 then
  local s, first, count, fingerprint = string.match(p[3] or '', '^(%d+):(%d+):(%d+):(%d+)$')
  if s ~= ARGV[4] or count ~= ARGV[5] or fingerprint ~= ARGV[6] then
    return {'OUTOFSEQ', tonumber(p[2]) + 1}
  end
  -- This write moves the connection's replication offset past the frame, so that WAIT covers it.
  if ARGV[7] ~= '' then call('PEXPIRE', KEYS[3], ARGV[7]) end
  if m[3] == ARGV[11] then return tonumber(first) end
  return {'OK', tonumber(first), tonumber(m[3])}
end

if m[11] and not KEYS[4] then return {'ORDERED', m[11]} end
local first = tonumber(m[4])
local refusal = append_frame(first, ARGV[5], ARGV[8], ARGV[9], ARGV[10], KEYS[4], ARGV, 12)
if refusal then return refusal end
local batch = ARGV[4] .. ':' .. m[4] .. ':' .. ARGV[5] .. ':' .. ARGV[6]
if known == ARGV[3] then
  call('HSET', KEYS[3], 'last', ARGV[4], slot, batch)
else
  if known then call('DEL', KEYS[3]) end
  call('HSET', KEYS[3], 'epoch', ARGV[3], 'last', ARGV[4], slot, batch)
end
if ARGV[7] ~= '' then call('PEXPIRE', KEYS[3], ARGV[7]) end
if m[3] == ARGV[11] then return first end
return {'OK', first, tonumber(m[3])}
