#!lua flags=allow-oom
-- Move a group's confirmed offset forward, for the owner of its present term only.
--
-- KEYS  1 meta  2 group
-- ARGV  1 incarnation  2 history of the sender's connection, '' if unknown
--       3 nonce  4 term  5 epoch of the stream in which the records were read
--       6 the next offset to process: all below are done
-- Returns {'OK', confirmed}, which is more than was asked for if it was there before, or
--   {'FENCED', term}: another term has begun;
--   {'EPOCH', epoch, epochs, end of the stream}: look whether these records still exist;
--   {'BEYOND', end of the stream}: they do not;
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}  {'HISTORY', history in meta}
-- Atomic because a confirm of an old owner must not come after the first one of the next.

local m = redis.call('HMGET', KEYS[1], 'incarnation', 'history', 'epoch', 'next', 'epochs')
if m[1] ~= ARGV[1] then return {m[1] and 'INCARNATION' or 'NOSTREAM'} end
local g = redis.call('HMGET', KEYS[2], 'incarnation', 'nonce', 'term', 'confirmed', 'start')
if g[1] ~= ARGV[1] then return {'NOGROUP'} end
if g[2] ~= ARGV[3] or g[3] ~= ARGV[4] then return {'FENCED', tonumber(g[3] or 0)} end
if m[2] ~= ARGV[2] and ARGV[2] ~= '' then return {'HISTORY', m[2]} end
if m[3] ~= ARGV[5] then return {'EPOCH', tonumber(m[3]), m[5], tonumber(m[4])} end

local offset = tonumber(ARGV[6])
if offset > tonumber(m[4]) then return {'BEYOND', tonumber(m[4])} end
local confirmed = tonumber(g[4] or g[5])
if offset <= confirmed then return {'OK', confirmed} end
redis.call('HSET', KEYS[2], 'confirmed', ARGV[6])
return {'OK', offset}
