#!lua flags=allow-oom
-- Begin to move staged frames into the log, once per (writer, version); or report its progress.
--
-- KEYS  1 meta  2 fences  3 plan  4... the stages, in order
-- ARGV  1 incarnation  2 writer  3 version  4 lifetime of a plan and its stages, ms
--       5 fields that each frame has in its stage  6 '1' to make a plan if there is none, else '0'
--       7 records in all stages  8... name and number of frames of each stage
-- Returns {'OK', frames moved, frames in all}: move the rest, by what the plan says, which may be
--   that of an earlier try; {'DONE', records}: this version is in the log, with so many records, -1
--   if they were not counted; {'PASSED', version}: a later one is; {'UNFINISHED', version, frames
--   moved, frames in all}: an earlier one has to be finished first; {'UNKNOWN'}: there is no plan,
--   and none was to be made; {'LOST', stage}; {'NOSTREAM'}; {'INCARNATION'}
-- Atomic because of two tries of one version, only one plan may be carried out.

local incarnation = redis.call('HGET', KEYS[1], 'incarnation')
if incarnation ~= ARGV[1] then return {incarnation and 'INCARNATION' or 'NOSTREAM'} end

local version = tonumber(ARGV[3])
local fence = redis.call('HGET', KEYS[2], ARGV[2])
local known, done, total, records = string.match(fence or '', '^(%d+):(%d+):(%d+):?(%d*)$')
if known then
  known, done, total = tonumber(known), tonumber(done), tonumber(total)
  if known > version then return {'PASSED', known} end
  if known == version then
    if done < total then return {'OK', done, total} end
    redis.call('HSET', KEYS[2], ARGV[2], fence) -- so that a WAIT after this waits for all of it
    return {'DONE', tonumber(records) or -1}
  end
  if done < total then return {'UNFINISHED', known, done, total} end
end
if ARGV[6] ~= '1' then return {'UNKNOWN'} end

local count = 0
for i = 4, #KEYS do
  local frames = tonumber(ARGV[2 * i + 1])
  if redis.call('HLEN', KEYS[i]) ~= ARGV[5] * frames then return {'LOST', ARGV[2 * i]} end
  count = count + frames
end
redis.call('DEL', KEYS[3])
for i = 4, #KEYS do
  redis.call('PEXPIRE', KEYS[i], ARGV[4])
  redis.call('RPUSH', KEYS[3], ARGV[2 * i] .. ':' .. ARGV[2 * i + 1])
end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('HSET', KEYS[2], ARGV[2], string.format('%.0f:0:%.0f:%s', version, count, ARGV[7]))
return {'OK', 0, count}
