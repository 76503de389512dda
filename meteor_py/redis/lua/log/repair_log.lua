-- Find entries that meteor_py did not write, and copy all other entries into a new log or index.
--
-- KEYS  1 log or index  2 meta  3 the copy
-- ARGV  1 incarnation  2 'log' or 'index'  3 ID after which to continue, '0-0' for the beginning
--       4 entries copied by earlier calls, '' to copy nothing  5 lifetime of an unfinished copy, ms
-- Returns {'MORE', ID for the next call, number of valid entries that this call has found, IDs of
--   foreign entries that it has found...}; at the end {'OK', '', number, IDs...}, after the copy, if
--   there is one, has replaced the original;
--   {'NOSTREAM'}; {'INCARNATION'}; {'GONE'}: the copy has expired, and nothing was changed.
-- Atomic because the copy must also contain frames that publishers append during the repair.
--
-- Only a copy works: the server never accepts an ID below the highest ID that a stream has ever had,
-- even after that entry is deleted. A call stops after 500 entries, or once it has read 1 MiB.

local meta = redis.call('HMGET', KEYS[2], 'incarnation', 'next')
if meta[1] ~= ARGV[1] then return {meta[1] and 'INCARNATION' or 'NOSTREAM'} end
local copied, after = tonumber(ARGV[4]), ARGV[3]
if copied and copied > 0 and redis.call('XLEN', KEYS[3]) ~= copied then return {'GONE'} end

-- Return whether an entry can be from meteor_py. An index entry needs only a valid ID.
local function is_ours(id, fields)
  local last, n = string.match(id, '^(%d+)-(%d+)$')
  last, n = tonumber(last), tonumber(n)
  if last >= tonumber(meta[2]) or n < 1 or n > last + 1 then return false end
  if ARGV[2] == 'index' then return true end
  local name = fields[3] or ''
  return (#fields == 4 or (#fields == 6 and fields[5] == 'crc' and string.find(fields[6], '^%d+$')))
    and fields[1] == 't' and string.find(fields[2], '^%d+$') and #fields[2] <= 15
    and (string.find(name, '^%d%d?%d?%l+$') or string.find(name, '^%d%d?%d?%l+%.[%l%d]+$'))
end

local reply, read = {'MORE', after, 0}, 0
for _ = 1, 500 do
  local entry = redis.call('XRANGE', KEYS[1], '(' .. after, '+', 'COUNT', 1)[1]
  if not entry then
    reply[1], after = 'OK', ''
    break
  end
  after = entry[1]
  local fields = entry[2]
  if is_ours(after, fields) then
    reply[3] = reply[3] + 1
    if copied then redis.call('XADD', KEYS[3], after, unpack(fields)) end
  else
    reply[#reply + 1] = after
  end
  for i = 1, #fields do read = read + #fields[i] end
  if read > 1048576 then break end
end
reply[2] = after
if copied and reply[1] == 'OK' then
  redis.call('UNLINK', KEYS[1])
  if copied + reply[3] > 0 then
    redis.call('PERSIST', KEYS[3])
    redis.call('RENAME', KEYS[3], KEYS[1])
  end
elseif copied then
  redis.call('PEXPIRE', KEYS[3], ARGV[5])
end
return reply
