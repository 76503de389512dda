-- Library for shared/step and shared/maintain: reads the group, the calling consumer, and the time.
--
-- KEYS  1 meta of the stream  2 index  3 meta of the group  4 members  5 keys  6 waiting  7 ready
--       8 blocked  9 delayed  10 leases  11 idle  12 unsettled  13 failures  14 letters  15 dying
--       16 purges  17 batches of this consumer  18 more of this consumer
-- ARGV  1 prefix of the group's keys, to build the names of other consumers' keys
--       2 incarnation of stream and group  3 this consumer, an id of six characters
--
-- The states of a record. Each offset from the group's start to `next` is in exactly one state:
--   held         in `batches:<consumer>`, in a delivery batch of up to 32 records from one step
--   waiting      in the entry of its ordering key, or in a chunk in `waiting` if many records wait
--   dead letter  in `letters`, until a consumer has published it
--   settled      not stored anywhere, only counted
-- The states of an ordering key. A key has an entry in `keys` while it has held or waiting records, or
-- is delayed or parked. A key has at most one owner: the consumer that holds records of the key or has
-- reserved the key.
--   free         has waiting records but no owner. It is in `ready`, by its first waiting offset.
--   owned        has an owner. If the owner may claim waiting records, the key is in `more:<owner>`.
--   delayed      stopped until a time in `delayed`. If records wait, it is in `blocked`.
--   parked       stopped until it is resumed. If records wait, it is in `blocked`.
--   behind       owned, but a returned record that waits is older than those held. It is in `blocked`.
-- The first unsettled offset is therefore the lowest of `next` and the first scores of `ready`,
-- `blocked` and `unsettled`, which lists batches and dead letters by their lowest offset.
--
-- A group has two clocks that never go back. `clock` decides when delays end. `tick` decides when
-- leases end, and advances by at most half a lease between two calls. Therefore, neither a server
-- outage nor a jump of the server's time can end a lease that was just renewed, and consumers that
-- come and go cannot prolong the leases of others.
local call, format, floor, min, max = redis.call, string.format, math.floor, math.min, math.max
local byte, sub, match, gmatch, rep = string.byte, string.sub, string.match, string.gmatch, string.rep
local pack, unpack_struct, concat = struct.pack, struct.unpack, table.concat
local type, pairs, ipairs, unpack, tonumber = type, pairs, ipairs, unpack, tonumber -- faster as locals
local KEYS, ARGV = KEYS, ARGV
local prefix, me = ARGV[1], ARGV[3]
local NOBODY, NEVER = '......', 2 ^ 52
local BATCH = 32 -- maximum number of records in a delivery batch
local LOADS = 400 -- a call that has read this many key entries starts no more work

local stream = call('HMGET', KEYS[1], 'incarnation', 'next', 'epoch', 'large')
if stream[1] ~= match(ARGV[2], '^[^.]*') then return {stream[1] and 'INCARNATION' or 'NOSTREAM'} end
local s = call('HMGET', KEYS[3], 'incarnation', 'progress', 'group_cap', 'lease_ms', 'max_waiting')
if s[1] ~= ARGV[2] then return {'NOGROUP'} end
local stream_end = tonumber(stream[2])
local cap, lease, room = tonumber(s[3]), tonumber(s[4]), tonumber(s[5])

-- The group's progress: the next offset to scan; the number of waiting records; both clocks; the
-- server's time at the last call; when to check for expired leases; when to check for due delays and
-- dead letters; the end of the watcher's term; the number of records that have failed; the number of
-- marks in `purges`; counters; the consumer whose records are being taken back; and the watcher, which
-- is the consumer that watches the index on behalf of all idle consumers.
local PROGRESS = '<ddddddddddddddddc6c6'
local p
do
  local next, waiting, clock, tick, last, reap_at, due, watch_until, failing, purging, acked, dead, lost,
    purged, returned, reaped, reaping, watcher = unpack_struct(PROGRESS, s[2])
  p = {next = next, waiting = waiting, clock = clock, tick = tick, last = last, reap_at = reap_at,
       due = due, watch_until = watch_until, failing = failing, purging = purging, acked = acked,
       dead = dead, lost = lost, purged = purged, returned = returned, reaped = reaped,
       reaping = reaping, watcher = watcher}
end

-- A consumer: the number of its last step; the end of its lease, in ticks; the number of records held;
-- the numbers of the first and last batch that its last step granted; three flags; the key that it
-- has reserved for a record's last delivery attempt; its name; and the report of its last step. The
-- flags: `idle`; `alone`, if it holds a record on its last attempt and must get no other; `dead`.
local MEMBER = '<dddddBBBHc0Hc0I4c0'
local function read_member(raw)
  local step, deadline, holding, first, last, idle, alone, dead, kept, name, report =
    unpack_struct(MEMBER, raw)
  return {step = step, deadline = deadline, holding = holding, first = first, last = last,
          idle = idle == 1, alone = alone == 1, dead = dead == 1, kept = kept, name = name, report = report}
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

-- By default, Lua writes numbers with 14 digits, but offsets can have 16.
local function text(o) return format('%.0f', o) end
local function many(command, key, arguments)
  for low = 1, #arguments, 1000 do
    call(command, key, unpack(arguments, low, min(low + 999, #arguments)))
  end
end
