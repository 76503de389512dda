-- Library for shared/purge and shared/resume: reads the group.
-- KEYS  1 meta of the stream  2 meta of the group
-- ARGV  1 incarnation of the stream, with or without that of the group  3 prefix
local found = redis.call('HGET', KEYS[1], 'incarnation')
if found ~= string.match(ARGV[1], '^[^.]*') then return {found and 'INCARNATION' or 'NOSTREAM'} end
local s = redis.call('HMGET', KEYS[2], 'incarnation', 'progress')
if not s[2] or (s[1] ~= ARGV[1] and string.match(s[1], '^[^.]*') ~= ARGV[1]) then return {'NOGROUP'} end
local NOBODY = '......'
local PROGRESS = '<ddddddddddddddddc6c6' -- see shared/_group.lua
local p = {}
p.next, p.waiting, p.clock, p.tick, p.last, p.reap_at, p.due, p.watch_until, p.failing, p.purging,
  p.acked, p.dead, p.lost, p.purged, p.returned, p.reaped, p.reaping, p.watcher =
  struct.unpack(PROGRESS, s[2])
local function write_progress()
  redis.call('HSET', KEYS[2], 'progress', struct.pack(PROGRESS, p.next, p.waiting, p.clock, p.tick, p.last,
             p.reap_at, p.due, p.watch_until, p.failing, p.purging, p.acked, p.dead, p.lost, p.purged,
             p.returned, p.reaped, p.reaping, p.watcher))
end
-- Wake a consumer if it is idle.
local function wake(idle, id)
  if id and redis.call('ZREM', idle, id) == 1 then
    redis.call('XADD', ARGV[3] .. 'wake:' .. id, 'MAXLEN', '=', 1, '*', 'w', 1)
  end
end
