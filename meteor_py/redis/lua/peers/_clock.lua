-- Peer group clock: reads the group's state and the time. Needs _members.lua. Each script that includes
-- this library must then do the work that is due: it includes _group_state.lua or _due_work.lua.

local EXPIRATIONS, CANDIDATES, EVENTS = P .. 'expirations', P .. 'candidates', P .. 'events'
local POLLS, LIMITS = P .. 'polls', P .. 'limits'
local PENDING, AGENDA, GRACED = P .. 'pending', P .. 'agenda', P .. 'graced'
local ORPHANS, PROPERTIES = P .. 'orphans', P .. 'properties'

local c = call('HMGET', CONFIG, 'ttl', 'expiration', 'election', 'min_size', 'max_inbox')
if not c[1] then return {'NOGROUP'} end
local TTL, EXPIRATION, ELECTION, MIN_SIZE = tonumber(c[1]), tonumber(c[2]), c[3], tonumber(c[4])
local MAX_INBOX = tonumber(c[5])
local s = call('HMGET', STATE, 'last', 'leader', 'term', 'session', 'life', 'mark', 'view', 'due')
if not s[5] then return {'NOGROUP'} end
local last, leader, term, session = tonumber(s[1] or nil), s[2] or '', tonumber(s[3] or 0), s[4] or ''
local incarnation, mark, view = s[5], s[6] or '', tonumber(s[7] or 0)
-- Nothing is due before this time (ms). The time is never far ahead, so an earlier version of these
-- scripts, which does not know this field, can safely run at the same time.
local due = tonumber(s[8] or 0)

-- If no script ran for half a ttl, the server was down, its clock was set, or no client called. Each
-- member then gets a full ttl for its next heartbeat. The expirations of dead members and the ends of
-- votes keep their remaining time. A member gets this grace once per heartbeat: otherwise, clients
-- that are repeatedly late or that rarely call would keep a dead member alive forever. If the clock
-- steps back a little, time stands still until the clock catches up.
local micros, seconds, now
do
  local time = call('TIME')
  local fraction = format('%06d', time[2])
  micros, seconds = time[1] .. fraction, time[1] .. '.' .. fraction
  now = time[1] * 1000 + math.floor(time[2] / 1000)
  local gap = now - (last or now)
  if math.abs(gap) > TTL / 2 then
    local members = call('ZRANGE', DEADLINES, 0, -1, 'WITHSCORES')
    for i = 1, #members, 2 do
      local id = members[i]
      if not call('ZSCORE', GRACED, id) then
        call('ZADD', DEADLINES, int(now + TTL), id)
        call('ZADD', GRACED, int(now), id)
      elseif gap < 0 then
        call('ZADD', DEADLINES, int(members[i + 1] + gap), id)
      end
    end
    for _, key in ipairs({EXPIRATIONS, POLLS}) do
      local all = call('ZRANGE', key, 0, -1, 'WITHSCORES')
      for i = 1, #all, 2 do call('ZADD', key, int(all[i + 1] + gap), all[i]) end
    end
    call('HINCRBY', STATE, 'graces', 1)
    due = 0
  elseif gap < 0 then
    now, due = last, 0
  end
  if now ~= last then call('HSET', STATE, 'last', int(now)) end
end

-- Record a heartbeat.
local function renew(id)
  call('ZADD', DEADLINES, int(now + TTL), id)
  call('ZREM', GRACED, id)
end

-- Whether this call has met a dead member's inbox that may still have messages for other members.
local orphans = false
