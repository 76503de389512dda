-- Peer group members: the names of keys, and the records of members. Each script except open.lua
-- starts with this library.
--
-- KEYS[1] is the prefix of the group's keys. It contains the hash tag, so all keys are in one slot.
-- keys.py describes the keys.
--
-- Lua creates a function whenever a script reaches its definition, which takes about as long as a
-- simple command. The libraries are therefore separate: a script that is called often reaches only
-- the functions that it calls.

local call, format, match, max, min = redis.call, string.format, string.match, math.max, math.min
local P = KEYS[1]
local CONFIG, STATE, MEMBERS = P .. 'config', P .. 'state', P .. 'members'
local DEADLINES, LEAVING, HANDLERS = P .. 'deadlines', P .. 'leaving', P .. 'handlers'
local HOUR = 3600000

local function int(x) return format('%.0f', x) end

-- Members: 'index:session:persistent:alive:priority:joined:metadata'. A dead member's session is
-- prefixed with '-'. No process has such a session, but the process that had the session last can
-- still recognize it.
local function read_member(id)
  local raw = call('HGET', MEMBERS, id)
  if not raw then return nil end
  local m = {}
  m.index, m.session, m.persistent, m.alive, m.priority, m.joined, m.metadata =
    match(raw, '^(%d+):(.-):(.):(.):(%-?%d+):(%d+):(.*)$')
  return m
end
