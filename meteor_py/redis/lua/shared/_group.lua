-- Library of shared/step and shared/maintain: reads the group and the calling consumer, and the time.
--
-- KEYS  1 meta of the stream  2 index  3 meta of the group  4 members  5 keys  6 waiting  7 ready
--       8 blocked  9 delayed  10 leases  11 idle  12 unsettled  13 failures  14 letters  15 dying
--       16 purges  17 batches, and 18 more, of this consumer
-- ARGV  1 prefix of the group's keys, from which those of other consumers are made
--       2 incarnation of stream and group  3 this consumer, an id of six characters
--
-- The states of a record. Each offset from the group's start to `next` is in exactly one place:
--   held      in a delivery batch, `batches:<consumer>`: up to 32 records that one step granted
--   waiting   in the key entry of its ordering key, or in a chunk of `waiting` if many wait
--   a letter  in `letters`, until it is published
--   settled   nowhere: only counted
-- The states of an ordering key. It has an entry in `keys` while it has unsettled records or is
-- stopped. Its owner is the consumer that holds records of it, and there is at most one.
--   free      no owner, records wait: listed in `ready` by its first waiting offset
--   owned     if records wait and the owner may claim them, they are listed in `more:<owner>`
--   delayed   until a time in `delayed`, or parked until resumed: listed in `blocked` if records wait
--   behind    owned, and a record that was returned waits before those that are held: in `blocked`
-- Thus the lowest of `next` and of the first scores of `ready`, `blocked` and `unsettled` (batches and
-- letters by their lowest offset) is the first offset that is not settled.
--
-- Two clocks that are never set back drive the group. Delays end by `clock`. Leases end by `tick`,
-- which advances by at most half a lease between two calls: neither an outage of the server nor a
-- jump of its time ends a lease, and consumers that come and go cannot prolong one.
local call, format, floor, min, max = redis.call, string.format, math.floor, math.min, math.max
local byte, sub, match, gmatch = string.byte, string.sub, string.match, string.gmatch
local pack, unpack_struct, concat = struct.pack, struct.unpack, table.concat
local type, pairs, ipairs, unpack, tonumber = type, pairs, ipairs, unpack, tonumber -- faster as locals
local prefix, me = ARGV[1], ARGV[3]
local NOBODY, NEVER = '......', 2 ^ 52
local BATCH = 32 -- records in a delivery batch
local LOADS = 400 -- key entries read, after which a call takes on no more work

local stream = call('HMGET', KEYS[1], 'incarnation', 'next', 'store', 'epoch', 'large', 'unindexed')
if stream[1] ~= match(ARGV[2], '^[^.]*') then return {stream[1] and 'INCARNATION' or 'NOSTREAM'} end
local s = call('HMGET', KEYS[3], 'incarnation', 'progress', 'group_cap', 'max_deliveries', 'lease_ms',
               'dead_letter', 'on_poison', 'default_group', 'ungrouped', 'max_waiting')
if s[1] ~= ARGV[2] then return {'NOGROUP'} end
local stream_end = tonumber(stream[2])
local cap, tries, lease, room = tonumber(s[3]), tonumber(s[4]), tonumber(s[5]), tonumber(s[10])
local letters, parks, default, free = s[6] ~= '', s[7] == 'park', s[8], s[9] == 'free'

-- The progress of the group: next offset to scan, records waiting, both clocks, the server's time at
-- the last call, the next times to look for expired leases and for due delays and letters, the end of
-- the watcher's term, records that have failed, marks in `purges`, counters; then the consumer whose
-- records are being taken back, and the consumer that watches the index for all idle ones.
local PROGRESS = '<ddddddddddddddddc6c6'
local p = {}
p.next, p.waiting, p.clock, p.tick, p.last, p.reap_at, p.due, p.watch_until, p.failing, p.purging,
  p.acked, p.dead, p.lost, p.purged, p.returned, p.reaped, p.reaping, p.watcher =
  unpack_struct(PROGRESS, s[2])

-- A consumer: number of its last step, end of its lease (tick), records held, first and last batch of
-- that step, whether it is idle, must get no other record beside the last try that it has ('alone'),
-- or is dead; a key that it keeps for a last try; its name; what its last step reported.
local MEMBER = '<dddddBBBHc0Hc0I4c0'
local function read_member(raw)
  local c, idle, alone, dead = {}, 0, 0, 0
  c.step, c.deadline, c.holding, c.first, c.last, idle, alone, dead, c.kept, c.name, c.report =
    unpack_struct(MEMBER, raw)
  c.idle, c.alone, c.dead = idle == 1, alone == 1, dead == 1
  return c
end
local function write_member(id, c)
  call('HSET', KEYS[4], id, pack(MEMBER, c.step, c.deadline, c.holding, c.first, c.last,
       c.idle and 1 or 0, c.alone and 1 or 0, c.dead and 1 or 0, #c.kept, c.kept, #c.name, c.name,
       #c.report, c.report))
end
local raw_member = call('HGET', KEYS[4], me)
if not raw_member then return {'FENCED', -1, ''} end
local c = read_member(raw_member)
if c.dead then return {'FENCED', c.step, c.report} end

local time = call('TIME')
local now = time[1] * 1000 + floor(time[2] / 1000)
local gap = max(now - p.last, 0)
p.clock, p.tick, p.last = p.clock + gap, p.tick + min(gap, floor(lease / 2)), now
local due_before = p.due

-- Lua writes numbers with 14 digits, and offsets may have 16.
local function text(o) return format('%.0f', o) end
local function many(command, key, arguments)
  for low = 1, #arguments, 1000 do
    call(command, key, unpack(arguments, low, min(low + 999, #arguments)))
  end
end
local function write_progress()
  call('HSET', KEYS[3], 'progress', pack(PROGRESS, p.next, p.waiting, p.clock, p.tick, p.last, p.reap_at,
       p.due, p.watch_until, p.failing, p.purging, p.acked, p.dead, p.lost, p.purged, p.returned,
       p.reaped, p.reaping, p.watcher))
end
local function maintenance_due()
  return (p.reaping ~= NOBODY or p.reap_at <= p.tick or p.due <= p.clock) and 1 or 0
end
