-- Library for shared/open and shared/convert: the initial values of a group.

-- Redis stores a small hash as a list, which it searches for each field. A long value prevents that.
local PADDING = string.rep('-', 600)
-- Releases before 0.3 expect a hash at the key that holds this text, so they refuse the group
-- without changing anything.
local NOTICE = 'This shared group needs meteor-py 0.3 or later.'
local NOBODY, NEVER = '......', 2 ^ 52

-- See PROGRESS in shared/_group.lua.
local function new_progress(start, waiting, failing, acked, dead, lost, purged, returned, reaped)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  return struct.pack('<ddddddddddddddddc6c6', start, waiting or 0, now, now, now, NEVER, 0, 0,
                     failing or 0, 0, acked or 0, dead or 0, lost or 0, purged or 0, returned or 0,
                     reaped or 0, NOBODY, NOBODY)
end
