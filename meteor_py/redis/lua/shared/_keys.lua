-- Library for shared/step and shared/maintain: key entries, and lines of waiting offsets.
--
-- A line is a string of offsets in ascending order, seven bytes each. A plain entry consists of the
-- owner (six bytes), the number of records held (two bytes), and the line of waiting offsets. An
-- extended entry begins with byte 255, and has the fields of `extended` below between the number and
-- the line. New offsets go into the entry until it has NEAR of them. Later offsets go into chunks,
-- which are the fields '<key>:<number>' of `waiting`. Returned offsets can make the line longer.
--
-- `entries` maps each key that this call uses to its entry. Most entries need no table, so a value has
-- one of three forms. A number is an entry that this consumer owns and that has no waiting records. It
-- is the number of records held, or 0 if there is no entry. A string is a plain entry that another
-- consumer owns, as stored. All other entries are tables.
local NEAR, CHUNK = 128, 128
local FREE, DELAYED, PARKED, BEHIND = 0, 1, 2, 3 -- the reason why a key is stopped; FREE if it is not
local EXTENDED = '<Bc6HBdddddd'
local entries, stored, loaded = {}, {}, 0
local own_one = me .. '\1\0'
local told, freed = {}, {} -- keys to add to `more`, by owner; keys that this call has freed

local function to_line(offsets, low, high)
  return pack('<' .. rep('I7', high - low + 1), unpack(offsets, low, high))
end
local function from_line(line)
  local offsets = {unpack_struct('<' .. rep('I7', #line / 7), line)}
  offsets[#offsets] = nil -- unpack also returns the position after the last offset
  return offsets
end
-- A batch consists of the number of its records (one byte), the line of their offsets, and their keys
-- as a MessagePack array.
local function read_batch(raw)
  local stop = 1 + 7 * byte(raw)
  return cmsgpack.unpack(sub(raw, stop + 1)), sub(raw, 2, stop)
end
local function write_batch(names, line)
  return string.char(#names) .. line .. cmsgpack.pack(names)
end

local function parse(raw, whole)
  if byte(raw) ~= 255 then
    local owner = sub(raw, 1, 6)
    if owner ~= me and owner ~= NOBODY and not whole then return raw end
    local low, high = byte(raw, 7, 8)
    local held = low + 256 * high
    if owner == me and #raw == 8 then return held end
    return {owner = owner, held = held, line = sub(raw, 9), set = owner == NOBODY and 7}
  end
  local x, t = {}, {}
  local _, at
  -- `stop` is one of the reasons above. Records up to the offset `suspect` are delivered one at a time.
  -- `blame` and `top` are the first and the last offset that a dead owner held. The chunks have the
  -- numbers `first` to `last`, and `far` is the number of offsets in them.
  _, t.owner, t.held, x.stop, x.suspect, x.blame, x.top, x.first, x.last, x.far, at =
    unpack_struct(EXTENDED, raw)
  t.line, t.extended = sub(raw, at), x
  t.set = t.line ~= '' and (x.stop ~= FREE and 8 or t.owner == NOBODY and 7)
  return t
end
local function load(names)
  local asked, n = {}, 0
  for i = 1, #names do
    local k = names[i]
    if stored[k] == nil and k ~= '' then
      n = n + 1
      stored[k], asked[n] = false, k
    end
  end
  loaded = loaded + n
  for low = 1, n, 1000 do
    local high = min(low + 999, n)
    local values = call('HMGET', KEYS[5], unpack(asked, low, high))
    for i = low, high do
      local k, raw = asked[i], values[i - low + 1]
      if not raw then
        entries[k] = 0
      else
        stored[k] = raw
        if raw == own_one then entries[k] = 1 else entries[k] = parse(raw) end
      end
    end
  end
end
local function as_table(k)
  local t = entries[k]
  if type(t) == 'table' then return t end
  if not t then stored[k], t = false, 0 end -- a keyless record gets an entry when it is returned
  t = type(t) == 'string' and parse(t, true) or
    {owner = t > 0 and me or NOBODY, held = t, line = '', set = false}
  entries[k] = t
  return t
end
local function extend(t)
  t.extended = t.extended or
    {stop = FREE, suspect = -1, blame = -1, top = -1, first = 0, last = -1, far = 0}
  return t.extended
end
local function tell(owner, k)
  local list = told[owner]
  if list then list[#list + 1] = k else told[owner] = {k} end
end
local function pull_chunk(k, t)
  local x = t.extended
  local field = k .. ':' .. text(x.first)
  local chunk = call('HGET', KEYS[6], field) or ''
  call('HDEL', KEYS[6], field)
  t.line, x.first, x.far = t.line .. chunk, x.first + 1, x.far - #chunk / 7
  if x.first > x.last then x.far = 0 end
end
-- Reduce the number of records that a key's owner holds.
local function let_go(k, t, count)
  if t.held >= cap and t.line ~= '' then tell(t.owner, k) end
  t.held = t.held - count
end
-- Free a key if its owner holds none of its records and has not reserved it for a last attempt.
local function disown(k, t)
  if t.held > 0 or k == c.kept then return end
  local x = t.extended
  if x and x.stop == BEHIND then x.stop = FREE end
  if t.owner ~= NOBODY and t.line ~= '' then freed[#freed + 1] = k end
  t.owner = NOBODY
end

-- The report of this call, and its changes to `failures` and `unsettled`.
local failed, refused, lost, dropped = {}, {}, {}, {}
local healed = {}          -- settled offsets whose failure counts, if any, are to be deleted
local marks = {}           -- the lowest offset of each changed batch or dead letter; false if settled
