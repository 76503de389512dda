-- The parts of the server's libraries `struct` and `cmsgpack` that our scripts use. fakeredis has
-- neither library. On fake://, redis/scripts.py inserts this file before scripts that use either.
local struct, cmsgpack = {}, {}
do
  local char, byte, floor = string.char, string.byte, math.floor
  local function integer(n, size)
    local bytes = {}
    for i = 1, size do bytes[i], n = char(n % 256), floor(n / 256) end
    return table.concat(bytes)
  end
  local function read_integer(s, at, size)
    local n = 0
    for i = at + size - 1, at, -1 do n = n * 256 + byte(s, i) end
    return n
  end
  local function double(n)
    if n == 0 then return string.rep('\0', 8) end
    local m, e = math.frexp(math.abs(n))
    m, e = (m * 2 - 1) * 2 ^ 52, e + 1022
    return integer(m % 2 ^ 48, 6) .. char(floor(m / 2 ^ 48) + e % 16 * 16)
      .. char((n < 0 and 128 or 0) + floor(e / 16))
  end
  local function read_double(s, at)
    local b7, b8 = byte(s, at + 6), byte(s, at + 7)
    local e = b8 % 128 * 16 + floor(b7 / 16)
    if e == 0 then return 0 end
    local m = read_integer(s, at, 6) + b7 % 16 * 2 ^ 48
    return (b8 >= 128 and -1 or 1) * math.ldexp(m / 2 ^ 52 + 1, e - 1023)
  end
  local sizes = {B = 1, H = 2, d = 8}
  function struct.pack(format, ...)
    local parts, at, values = {}, 0, {...}
    for kind, size in string.gmatch(format, '(%a)(%d*)') do
      at = at + 1
      size = tonumber(size) or sizes[kind]
      if kind == 'd' then
        parts[at] = double(values[at])
      elseif kind == 'c' then
        parts[at] = size == 0 and values[at] or string.sub(values[at], 1, size)
      else
        parts[at] = integer(values[at], size)
      end
    end
    return table.concat(parts)
  end
  function struct.unpack(format, s, at)
    local found
    at, found = at or 1, {}
    for kind, size in string.gmatch(format, '(%a)(%d*)') do
      size = tonumber(size) or sizes[kind]
      if kind == 'c' and size == 0 then size = table.remove(found) end
      if at + size - 1 > #s then error('data string too short') end
      if kind == 'd' then
        found[#found + 1] = read_double(s, at)
      elseif kind == 'c' then
        found[#found + 1] = string.sub(s, at, at + size - 1)
      else
        found[#found + 1] = read_integer(s, at, size)
      end
      at = at + size
    end
    found[#found + 1] = at
    return unpack(found)
  end
  function cmsgpack.pack(list)
    local parts = {#list < 16 and char(144 + #list) or '\220' .. char(floor(#list / 256), #list % 256)}
    for i, s in ipairs(list) do
      local head = #s < 32 and char(160 + #s) or #s < 256 and '\217' .. char(#s)
        or '\218' .. char(floor(#s / 256), #s % 256)
      parts[i + 1] = head .. s
    end
    return table.concat(parts)
  end
  function cmsgpack.unpack(s)
    local count, at, list = byte(s, 1) - 144, 2, {}
    if count == 76 then count, at = byte(s, 2) * 256 + byte(s, 3), 4 end
    for i = 1, count do
      local head = byte(s, at)
      local size = head - 160
      if head == 217 then size, at = byte(s, at + 1), at + 1 end
      if head == 218 then size, at = byte(s, at + 1) * 256 + byte(s, at + 2), at + 2 end
      if size < 0 or at + size > #s then error('bad data') end
      list[i], at = string.sub(s, at + 1, at + size), at + size + 1
    end
    return list
  end
end
