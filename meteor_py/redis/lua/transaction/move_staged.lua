-- Move some frames from a stage into the log, and count them.
--
-- KEYS  1 log  2 meta  3 fences  4 plan  5 stage  6 index, if the stream has an ordering key
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown  3 writer  4 version
--       5 frames that were moved before, of all stages  6 the first frame of this stage to move
--       7 how many it has  8 bytes after which to stop; each frame costs some more, as it takes time
-- Returns {'OK', frames moved in all}, or what kept them from being moved:
--   {'NOSTREAM'}  {'INCARNATION'}  {'HISTORY', history in meta}  {'FULL', archived}  {'EXHAUSTED'}
--   {'FENCED', version there}  {'AT', frames moved}: not as many as the caller thinks
--   {'LOST'}: the stage does not have the frame
-- Atomic because a frame in the log, and its being counted, must agree. Each frame is whole in
-- itself: in a server that is out of memory the script ends at the XADD of its first one (see
-- publish.lua), and nothing is moved that is not counted.

local m = redis.call('HMGET', KEYS[2], 'incarnation', 'history', 'next', 'appended', 'capacity',
                     'archived', 'max_unarchived')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', m[2]} end
local format = string.format
-- Behind the frames are the records, which older releases did not count.
local version, done, total, records = string.match(
  redis.call('HGET', KEYS[3], ARGV[3]) or '', '^(%d+):(%d+):(%d+)(.*)$')
if version ~= ARGV[4] then return {'FENCED', tonumber(version or 0)} end
if done ~= ARGV[5] then return {'AT', tonumber(done)} end
done, total = tonumber(done), tonumber(total)

-- The strings of an entry of the index, each with its length before it.
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

local next_offset, appended = tonumber(m[3]), tonumber(m[4])
local clock = redis.call('TIME')
local now = format('%.0f', math.max(clock[1] * 1000 + math.floor(clock[2] / 1000), appended))
local bytes, limit = 0, tonumber(ARGV[8])
for frame = tonumber(ARGV[6]), tonumber(ARGV[7]) - 1 do
  local f = format('%.0f', frame)
  local fields = {f .. 'n', f .. 'f', f .. 'p', f .. 'c', f .. 'g'}
  local s = redis.call('HMGET', KEYS[5], unpack(fields))
  if not s[3] or (KEYS[6] and not s[5]) then return {'LOST'} end
  local after = next_offset + tonumber(s[1])
  if after > 9007199254740991 then return {'EXHAUSTED'} end
  local floor = after - tonumber(m[5])
  if m[6] then
    local archived = tonumber(m[6])
    if after - archived > tonumber(m[7]) and archived < next_offset then
      if bytes > 0 then break end
      return {'FULL', archived}
    end
    floor = math.min(floor, archived)
  end
  local minid = format('%.0f-0', math.max(floor, 0))
  local id = format('%.0f-', after - 1) .. s[1]
  if s[4] == '' then
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, s[2], s[3])
  else
    redis.call('XADD', KEYS[1], 'MINID', '=', minid, id, 't', now, s[2], s[3], 'crc', s[4])
  end
  if KEYS[6] then
    redis.call('XADD', KEYS[6], 'MINID', '=', minid, id, unpack(strings(s[5])))
  end
  done, next_offset = done + 1, after
  redis.call('HSET', KEYS[2], 'next', format('%.0f', after), 'appended', now)
  redis.call('HSET', KEYS[3], ARGV[3], format('%s:%.0f:%.0f%s', version, done, total, records))
  redis.call('HDEL', KEYS[5], unpack(fields))
  bytes = bytes + #s[3] + 1024
  if bytes >= limit then break end
end
if done == total then redis.call('DEL', KEYS[4]) end
return {'OK', done}
