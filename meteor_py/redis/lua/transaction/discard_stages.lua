#!lua flags=allow-oom
-- Delete stages that will not be committed, except those that are part of the writer's plan.
--
-- KEYS  1 plan  2... the stages
-- ARGV  1... the name of each stage
-- Returns how many were deleted
-- Atomic because a plan that is made in between could not be carried out.

local planned = {}
for _, entry in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  planned[string.match(entry, '^(.*):%d+$')] = true
end
local deleted = 0
for i = 2, #KEYS do
  if not planned[ARGV[i - 1]] then deleted = deleted + redis.call('UNLINK', KEYS[i]) end
end
return deleted
