-- Move some frames from a stage into the log, and count them.
--
-- KEYS  1 log  2 meta  3 fences  4 plan  5 stage  6 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown  3 writer  4 version
--       5 frames that were moved before, of all stages  6 the first frame of this stage to move
--       7 how many it has  8 bytes after which to stop; each frame costs some more, as it takes time
-- Returns {'OK', frames moved in all}, or the reason why they were not moved:
--   {'NOSTREAM'}  {'INCARNATION'}  {'HISTORY', history in meta}  {'FULL', archived}  {'EXHAUSTED'}
--   {'FENCED', version there}  {'AT', frames moved}: not as many as the caller thinks
--   {'LOST'}: the stage does not have the frame
-- Atomic because a frame in the log, and its being counted, must agree. Each frame is whole in
-- itself: in a server that is out of memory the script ends at the XADD of its first one (see
-- publish.lua), and no frame is moved without being counted.

-- Behind the frames are the records, which older releases did not count.
local version, done, total, records = string.match(
  redis.call('HGET', KEYS[3], ARGV[3]) or '', '^(%d+):(%d+):(%d+)(.*)$')
if version ~= ARGV[4] then return {'FENCED', tonumber(version or 0)} end
if done ~= ARGV[5] then return {'AT', tonumber(done)} end
done, total = tonumber(done), tonumber(total)

-- The strings of an index entry, each of which follows its length.
local function strings(packed)
  local found, at = {}, 1
  while at <= #packed do
    local colon = string.find(packed, ':', at, true)
    local last = colon + tonumber(string.sub(packed, at, colon - 1))
    found[#found + 1] = string.sub(packed, colon + 1, last)
    at = last + 1
  end
  return found
end

local next_offset, now = tonumber(m[4]), append_time()
local bytes, limit = 0, tonumber(ARGV[8])
for number = tonumber(ARGV[6]), tonumber(ARGV[7]) - 1 do
  local f = format('%.0f', number)
  local fields = {f .. 'n', f .. 'f', f .. 'p', f .. 'c', f .. 'g'}
  local s = redis.call('HMGET', KEYS[5], unpack(fields))
  if not s[3] or (KEYS[6] and not s[5]) then return {'LOST'} end
  local refusal
  if KEYS[6] then
    refusal = append_frame(next_offset, s[1], now, s[2], s[3], s[4], KEYS[6], unpack(strings(s[5])))
  else
    refusal = append_frame(next_offset, s[1], now, s[2], s[3], s[4])
  end
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
