#!lua flags=allow-oom
-- Acquire a group's lease, if it is free.
--
-- KEYS  1 meta  2 group  3 lease  4 events
-- ARGV  1 incarnation  2 name of the group  3 name of the member  4 nonce
--       5 lifetime of the lease, ms  6 expired term whose grace period is over, '' for none
--       7 the new term must be above this number
-- Returns {'OK', term, position, epoch of the stream, end of the stream, 'floating' or ''}, or
--   {'HELD', ms until the lease expires, ID of the last event, owner}
--   {'EXPIRED', 0, ID of the last event, owner, term}: the owner did not release the lease, and may
--     be alive without a connection. Wait out the grace period, then try again with that term.
--   {'NOSTREAM'}  {'INCARNATION'}  {'NOGROUP'}
-- Atomic because there must be only one owner, and a waiter must not miss a release event.
--
-- If the group already has the caller's nonce, the first reply was lost, so send it again.
-- 'floating' means that the position is "the first available" (see open_group). It applies only to
-- the first term: the next term must not silently skip records that the first term received but did
-- not confirm. During the first term, the group's 'floating' field holds the number of that term.
--
-- 'ended' lists the last terms that another member or a seek has ended, newest first, each as
-- 'nonce:position,'. If the reply to an owner's last confirm was lost, the owner finds its final
-- position there. The comma after each entry shows that the entry is complete and was not cut off.

local function last_event()
  local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
  return last and last[1] or '0-0'
end

local g = redis.call('HMGET', KEYS[2], 'incarnation', 'term', 'nonce', 'owner', 'confirmed',
                     'start', 'floating', 'ended')
if g[1] ~= ARGV[1] then return {'NOGROUP'} end
local position = tonumber(g[5] or g[6])
local left = redis.call('PTTL', KEYS[3])

if g[3] == ARGV[4] then
  if left > 0 then
    redis.call('SET', KEYS[3], ARGV[3] .. ' ' .. g[2] .. ' 0', 'PX', ARGV[5])
    local floating = g[7] == g[2] and 'floating' or ''
    return {'OK', tonumber(g[2]), position, tonumber(epoch), next_offset, floating}
  end
elseif left ~= -2 then
  return {'HELD', left, last_event(), g[4] or ''}
elseif g[4] and g[4] ~= '' and g[2] ~= ARGV[6] then
  return {'EXPIRED', 0, last_event(), g[4], tonumber(g[2])}
end

-- An ordinary group's term follows the clock. An archiver's term (its group name starts with '.')
-- normally increases by one, because archivers combine it with the epoch, which follows the clock (see
-- archive/archive_term.py).
local now = 0
if string.sub(ARGV[2], 1, 1) ~= '.' then
  local clock = redis.call('TIME')
  now = clock[1] * 1000 + math.floor(clock[2] / 1000)
end
local term = string.format('%.0f', math.max(tonumber(g[2] or 0) + 1, now, ARGV[7] + 1))
local floating = g[7] == 'floating' and 'floating' or ''
redis.call('HSET', KEYS[2], 'term', term, 'owner', ARGV[3], 'nonce', ARGV[4],
           'floating', floating == '' and '' or term)
if g[3] and g[3] ~= '' and g[3] ~= ARGV[4] then
  local ended = g[3] .. ':' .. (g[5] or g[6]) .. ',' .. (g[8] or '')
  redis.call('HSET', KEYS[2], 'ended', string.sub(ended, 1, 256))
end
redis.call('SET', KEYS[3], ARGV[3] .. ' ' .. term .. ' 0', 'PX', ARGV[5])
redis.call('XADD', KEYS[4], 'MAXLEN', '~', 1000, '*', 'event', 'assigned', 'group', ARGV[2],
           'member', ARGV[3], 'term', term)
return {'OK', tonumber(term), position, tonumber(epoch), next_offset, floating}
