-- Library for scripts that trim the ordering-key index together with the log.

-- Return the ID below which index entries belong to frames that lie wholly below the offset `floor`.
-- The log drops only whole frames. A frame may have several index entries (see
-- records/ordering_index.py), and the ID of each entry says where its frame starts.
local function index_floor(index, floor)
  local entry = redis.call('XRANGE', index, string.format('%.0f-0', floor), '+', 'COUNT', 1)[1]
  if entry then
    local last, up_to = string.match(entry[1], '^(%d+)-(%d+)$')
    floor = math.min(floor, math.max(last - up_to + 1, 0))
  end
  return string.format('%.0f-0', floor)
end
