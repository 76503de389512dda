#!lua flags=no-writes
-- Return frame boundaries, so that callers can split the ring among parallel readers.
--
-- KEYS  1 log
-- ARGV  offsets
-- Returns for each the offset behind the frame that holds it; 0 if no frame in the ring does.
-- Atomic only by the way: it is a script because XRANGE would send the frames, and their IDs are
-- all that is wanted.

local ends = {}
for i, offset in ipairs(ARGV) do
  ends[i] = 0
  local entry = redis.call('XRANGE', KEYS[1], offset .. '-0', '+', 'COUNT', 1)[1]
  if entry then
    local last, n = string.match(entry[1], '^(%d+)-(%d+)$')
    if tonumber(last) - tonumber(n) < tonumber(offset) then ends[i] = tonumber(last) + 1 end
  end
end
return ends
