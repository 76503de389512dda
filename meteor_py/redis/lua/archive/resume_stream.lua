#!lua
-- Create a stream from the state in its store, or return the settings of an existing stream.
--
-- KEYS  1 meta  2 settings  3 fences  4 groups  5... the groups to restore
-- ARGV  1 incarnation  2 total number of meta fields and values that follow
--       3... meta fields and values; then for each group: name, start, confirmed or '',
--       floating, term; then for each writer: name, fence
-- Returns {1 if created else 0, all fields and values of meta, all fields and values of settings}.
-- Atomic because a writer or member that finds the stream must also find its own state.

local created = 0
if redis.call('EXISTS', KEYS[1]) == 0 then
  local fields = tonumber(ARGV[2])
  local at = 3 + fields
  redis.call('HSET', KEYS[1], 'version', '1', 'incarnation', ARGV[1], unpack(ARGV, 3, at - 1))
  copy_settings(KEYS[1], KEYS[2])
  -- There was no meta, so existing fences and groups are leftovers, and may be ahead of the store.
  redis.call('DEL', KEYS[3], KEYS[4])
  for i = 5, #KEYS do
    local name, start, confirmed, floating, term = unpack(ARGV, at, at + 4)
    redis.call('DEL', KEYS[i])
    redis.call('HSET', KEYS[i], 'incarnation', ARGV[1], 'start', start, 'floating', floating,
               'term', term)
    if confirmed ~= '' then redis.call('HSET', KEYS[i], 'confirmed', confirmed) end
    redis.call('SADD', KEYS[4], name)
    at = at + 5
  end
  for i = at, #ARGV, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
  created = 1
end
return {created, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
