-- Library of the scripts that trim the index of ordering keys together with the log.

-- Return the ID below which index entries belong to frames that lie wholly below the offset `floor`.
-- The log drops only whole frames, and a frame may have several index entries (see
-- records/ordering_index.py): the ID of each tells where its frame starts.
local function index_floor(index, floor)
  local entry = redis.call('XRANGE', index, string.format('%.0f-0', floor), '+', 'COUNT', 1)[1]
  if entry then
    local last, up_to = string.match(entry[1], '^(%d+)-(%d+)$')
    floor = math.min(floor, math.max(last - up_to + 1, 0))
  end
  return string.format('%.0f-0', floor)
end
