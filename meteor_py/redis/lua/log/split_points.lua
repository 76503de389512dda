#!lua flags=no-writes
-- Return frame boundaries, so that callers can split the ring among parallel readers.
--
-- KEYS  1 log
-- ARGV  offsets
-- Returns, for each offset, the end of the frame that holds it, or 0 if it is not in the ring. If there
--   are more than 1,000 offsets, or their frames exceed the byte limit for one call, the list is
--   shorter: call again for the rest.
-- Atomic, although it need not be: it is a script because XRANGE would send whole frames, and the
-- caller needs only their IDs.

local ends, bytes = {}, 0
for i, offset in ipairs(ARGV) do
  if bytes > 4194304 or i > 1000 then break end
  ends[i] = 0
  local entry = redis.call('XRANGE', KEYS[1], offset .. '-0', '+', 'COUNT', 1)[1]
  if entry then
    bytes = bytes + #(entry[2][4] or '')
    local last, n = string.match(entry[1], '^(%d+)-(%d+)$')
    if tonumber(last) - tonumber(n) < tonumber(offset) then ends[i] = tonumber(last) + 1 end
  end
end
return ends
