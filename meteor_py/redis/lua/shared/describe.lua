#!lua flags=no-writes
-- Describe a shared group at one instant.
--
-- KEYS  1 meta  2 state  3 ready  4 blocked  5 leases  6 consumers  7 letters
-- ARGV  1 incarnation  2 prefix of the shared group's keys, from which those of its consumers are made
-- Returns {'OK', fields and values of the state, confirmed, number of ready ordering keys, number of
--   blocked ones, dead letters to publish, and for each consumer: id, name, ordering keys, records
--   held, ms until its lease expires},
--   or {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because 'confirmed' is the lowest unsettled offset among waiting, held and unscanned records,
-- which must be read together. Run time grows with the ordering keys that consumers hold.

local call = redis.call
local found = call('HGET', KEYS[1], 'incarnation')
if found ~= string.match(ARGV[1], '^[^.]*') then
  return {found and 'INCARNATION' or 'NOSTREAM'}
end
local s = call('HMGET', KEYS[2], 'incarnation', 'next')
if s[1] ~= ARGV[1] and string.match(s[1] or '', '^[^.]*') ~= ARGV[1] then return {'NOGROUP'} end

local confirmed = tonumber(s[2])
local function open(offset)
  offset = tonumber(offset or nil)
  if offset and offset < confirmed then confirmed = offset end
end
for i = 3, 4 do open(call('ZRANGE', KEYS[i], 0, 0, 'WITHSCORES')[2]) end
for _, offset in ipairs(call('HKEYS', KEYS[7])) do open(offset) end

local clock = call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local consumers = {}
local flat = call('HGETALL', KEYS[6])
for i = 1, #flat, 2 do
  local owned, records = 0, 0
  for _, held in ipairs(call('HVALS', ARGV[2] .. 'held:' .. flat[i])) do
    open(string.match(held, '^%d+'))
    local _, commas = string.gsub(held, ',', '')
    if string.find(held, '^%d') then owned, records = owned + 1, records + commas + 1 end
  end
  open(call('ZRANGE', ARGV[2] .. 'more:' .. flat[i], 0, 0, 'WITHSCORES')[2])
  local left = tonumber(call('ZSCORE', KEYS[5], flat[i]) or 0) - now
  local name = string.match(flat[i + 1], '^%d+:.-:(.*)$')
  for _, x in ipairs({flat[i], name, owned, records, left}) do consumers[#consumers + 1] = x end
end
return {'OK', call('HGETALL', KEYS[2]), confirmed, call('ZCARD', KEYS[3]), call('ZCARD', KEYS[4]),
        call('HLEN', KEYS[7]), consumers}
