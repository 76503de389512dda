#!lua flags=allow-oom
-- Delete stages that will not be committed, except those that are part of the writer's plan.
--
-- KEYS  1 plan  2 the hash that lists the writer's stages  3... the stages
-- ARGV  1... the name of each stage
-- Returns the number of deleted stages.
-- Atomic because a plan made in between would lack its stages.

local planned = {}
for _, entry in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  planned[string.match(entry, '^(.*):%d+$')] = true
end
local deleted = 0
for i = 3, #KEYS do
  local name = ARGV[i - 2]
  if not planned[name] then
    deleted = deleted + redis.call('UNLINK', KEYS[i])
    redis.call('HDEL', KEYS[2], name)
  end
end
return deleted
