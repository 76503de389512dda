#!lua flags=allow-oom
-- Move some frames from a stage into the log, and count them.
--
-- KEYS  1 log  2 meta  3 fences  4 plan  5 stage  6 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown  3 writer  4 version
--       5 frames moved so far, from all stages  6 the first frame to move from this stage
--       7 frames in this stage  8 bytes after which to stop; each frame counts 1 KiB extra
-- Returns {'OK', frames moved so far, from all stages}, or the reason why a frame could not be moved
--   (the call may have moved others before it):
--   {'NOSTREAM'}  {'INCARNATION'}  {'HISTORY', history in meta}  {'FULL', archived}  {'EXHAUSTED'}
--   {'FENCED', current version}  {'AT', frames moved so far}: ARGV[5] is wrong
--   {'LOST'}, {'INVALID'}: the frame is not in the stage, or another program has changed it
-- Atomic because the log and the count of moved frames must agree. It also runs on a server that is
-- out of memory: each frame leaves the stage when it enters the log, so the server needs room for
-- only one frame. Otherwise a full server could never empty the stage.

-- A fence ends with the number of records, which older releases did not write.
local version, done, total, records = string.match(
  redis.call('HGET', KEYS[3], ARGV[3]) or '', '^(%d+):(%d+):(%d+)(.*)$')
if version ~= ARGV[4] then return {'FENCED', tonumber(version or 0)} end
if done ~= ARGV[5] then return {'AT', tonumber(done)} end
done, total = tonumber(done), tonumber(total)

-- Unpack the length-prefixed strings of an index entry; return nil if the entry is malformed.
local function strings(packed)
  local found, at = {}, 1
  while at <= #packed do
    local size, start = string.match(packed, '^(%d%d?%d?%d?%d?%d?):()', at)
    if not size or start + size - 1 > #packed then return nil end
    found[#found + 1] = string.sub(packed, start, start + size - 1)
    at = start + size
  end
  return #found % 2 == 0 and #found > 0 and #found < 5000 and found or nil
end

-- Convert an index entry from a release before 0.3, which staged one entry per frame: two bytes for
-- each record's key, then the keys. Return any other entry unchanged.
local function renewed(found, n)
  if #found[1] ~= 2 * n then return found end
  local entries = {}
  for low = 1, n, 64 do
    local numbers, names, known = {}, {}, {}
    for i = low, math.min(low + 63, n) do
      local least, most = string.byte(found[1], 2 * i - 1, 2 * i)
      local key = found[least + 256 * most + 2] or ''
      if not known[key] then
        known[key], names[#names + 1] = #names, key
      end
      numbers[#numbers + 1] = string.char(known[key])
    end
    entries[#entries + 1], entries[#entries + 2] = table.concat(numbers), cmsgpack.pack(names)
  end
  return entries
end

local next_offset = tonumber(m[4])
-- All other clients wait during this call, so it stops after 16 MiB, whatever the caller asks for.
local bytes, limit = 0, math.min(tonumber(ARGV[8]), 16777216)
for number = tonumber(ARGV[6]), tonumber(ARGV[7]) - 1 do
  local f = format('%.0f', number)
  local fields = {f .. 'n', f .. 'f', f .. 'p', f .. 'c', f .. 'g'}
  local s = redis.call('HMGET', KEYS[5], unpack(fields))
  if not (s[1] and s[2] and s[3] and s[4]) then return {'LOST'} end
  -- A stage that was written before the stream got an ordering key has no index entries.
  -- Consumers build the missing entries from its frames.
  local entry = KEYS[6] and s[5] and strings(s[5])
  if KEYS[6] and s[5] and not entry then return {'LOST'} end
  if entry then entry = renewed(entry, tonumber(s[1]) or 0) end
  local refusal = append_frame(next_offset, s[1], s[2], s[3], s[4], entry and KEYS[6], entry, 1)
  if refusal then
    if refusal[1] == 'FULL' and bytes > 0 then break end
    return refusal
  end
  done, next_offset = done + 1, next_offset + tonumber(s[1])
  redis.call('HSET', KEYS[3], ARGV[3], format('%s:%.0f:%.0f%s', version, done, total, records))
  redis.call('HDEL', KEYS[5], unpack(fields))
  bytes = bytes + #s[3] + 1024
  if bytes >= limit then break end
end
if done == total then redis.call('DEL', KEYS[4]) end
return {'OK', done}
