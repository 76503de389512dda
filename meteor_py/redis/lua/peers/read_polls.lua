#!lua flags=allow-oom
-- Read one poll, or the polls that a member must catch up on.
--
-- KEYS  1 the prefix of the group's keys
-- ARGV  1 'poll' or 'member'  2 its id
-- Returns {'OK', ms left to vote, fields and values of a poll in the format of its events, ...}; only
--   'OK' if there is no poll; or {'NOGROUP'}. For a member: the open polls in which it has not voted
--   yet, then the polls of agreed actions that it was asked to vote on. Future actions precede those
--   from the last hour, and the nearest come first. At most 200 agreed actions are returned.
-- Atomic because it also closes polls whose time is up: every client that reads polls helps with this.

local reply = {'OK'}
local function add(id)
  local fields = describe(id)
  if not fields then return end
  local ends = tonumber(call('ZSCORE', POLLS, id) or 0)
  local limit = tonumber(call('ZSCORE', LIMITS, id) or ends)
  reply[#reply + 1] = max(min(ends, limit) - now, 0)
  reply[#reply + 1] = fields
end
if ARGV[1] == 'poll' then
  add(ARGV[2])
  return reply
end
for _, id in ipairs(call('ZRANGE', POLLS, 0, -1)) do
  if call('HGET', P .. 'votes:' .. id, ARGV[2]) == '-' then add(id) end
end
prune()
local most = #reply + 400
local function add_agreed(name)
  local id = match(call('HGET', PENDING, name) or '', '^(.-):')
  if id and #reply < most and call('HGET', P .. 'poll:' .. id, 'result') == 'yes'
     and call('HEXISTS', P .. 'votes:' .. id, ARGV[2]) == 1 then
    add(id)
  end
end
for _, name in ipairs(call('ZRANGEBYSCORE', AGENDA, int(now), '+inf', 'LIMIT', 0, 1000)) do
  add_agreed(name)
end
for _, name in ipairs(call('ZRANGE', AGENDA, '(' .. int(now), '-inf', 'BYSCORE', 'REV',
                           'LIMIT', 0, 200)) do
  add_agreed(name)
end
return reply
