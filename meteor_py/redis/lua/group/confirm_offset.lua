#!lua flags=allow-oom
-- Advance a group's confirmed offset. Only the owner of the current term may do so.
--
-- KEYS  1 meta  2 group
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown
--       3 nonce  4 term  5 epoch of the stream in which the records were read
--       6 the next offset to process: all records below it are done
-- Returns {'OK', confirmed offset}, which is higher than ARGV[6] if it was higher before, or
--   {'FENCED', term}: another term has begun;
--   {'EPOCH', epoch, epochs, end of the stream}: check whether the confirmed records still exist;
--   {'BEYOND', end of the stream}: the confirmed records no longer exist;
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'HISTORY', history in meta}
-- Atomic because an old owner must not confirm after the next term has begun.

local g = redis.call('HMGET', KEYS[2], 'incarnation', 'nonce', 'term', 'confirmed', 'start')
if g[1] ~= ARGV[1] then return {'NOGROUP'} end
if g[2] ~= ARGV[3] or g[3] ~= ARGV[4] then return {'FENCED', tonumber(g[3] or 0)} end
if history ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', history} end
if epoch ~= ARGV[5] then
  return {'EPOCH', tonumber(epoch), redis.call('HGET', KEYS[1], 'epochs'), next_offset}
end

local offset = tonumber(ARGV[6])
if offset > next_offset then return {'BEYOND', next_offset} end
local confirmed = tonumber(g[4] or g[5])
if offset <= confirmed then return {'OK', confirmed} end
redis.call('HSET', KEYS[2], 'confirmed', ARGV[6])
return {'OK', offset}
