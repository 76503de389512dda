-- Library for scripts that act on one incarnation of a stream. Each script has KEYS  1 meta and
-- ARGV  1 incarnation.

local meta = redis.call('HMGET', KEYS[1], 'incarnation', 'next', 'epoch', 'history')
if meta[1] ~= ARGV[1] then return {meta[1] and 'INCARNATION' or 'NOSTREAM'} end
local next_offset, epoch, history = tonumber(meta[2]), meta[3], meta[4]

