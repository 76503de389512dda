#!lua flags=allow-oom
-- Plan the move of staged frames into the log, once per (writer, version), or report progress.
--
-- KEYS  1 meta  2 fences  3 plan  4... the stages, in order
-- ARGV  1 incarnation  2 writer  3 version  4 lifetime of a plan and its stages, ms
--       5 '1' to make a plan if there is none, else '0'  6 records in all stages
--       7... for each stage: name, number of frames
-- Returns {'OK', frames moved, total frames}: move the remaining frames of the plan, which an earlier
--   attempt may have made; {'DONE', records}: this version is in the log, with that many records
--   (-1 if unknown); {'PASSED', version}: a later version is in the log, at least in part;
--   {'UNFINISHED', version, frames moved, total frames}: this earlier version must be finished first;
--   {'UNKNOWN'}: there is no plan, and the caller did not ask to make one; {'LOST', stage}: the stage
--   has expired or is not complete; {'NOSTREAM'}; {'INCARNATION'}
-- Atomic because only one of two attempts at a version may make its plan.

local version = tonumber(ARGV[3])
local fence = redis.call('HGET', KEYS[2], ARGV[2])
local known, done, total, records = string.match(fence or '', '^(%d+):(%d+):(%d+):?(%d*)$')
if known then
  known, done, total = tonumber(known), tonumber(done), tonumber(total)
  if known > version then return {'PASSED', known} end
  if known == version then
    if done < total then return {'OK', done, total} end
    redis.call('HSET', KEYS[2], ARGV[2], fence) -- a write, so that a following WAIT covers the version
    return {'DONE', tonumber(records) or -1}
  end
  if done < total then return {'UNFINISHED', known, done, total} end
end
if ARGV[5] ~= '1' then return {'UNKNOWN'} end

local count = 0
for i = 4, #KEYS do
  local name, frames = ARGV[2 * i - 1], tonumber(ARGV[2 * i])
  -- Either all frames in a stage have an index entry, or none do: the stream may have
  -- got its ordering key after the stage was written.
  local fields = 4 + redis.call('HEXISTS', KEYS[i], '0g')
  if frames > 0 and redis.call('HEXISTS', KEYS[i], '0n') == 0 then return {'LOST', name} end
  if redis.call('HLEN', KEYS[i]) ~= fields * frames then return {'LOST', name} end
  count = count + frames
end
redis.call('DEL', KEYS[3])
for i = 4, #KEYS do
  redis.call('PEXPIRE', KEYS[i], ARGV[4])
  redis.call('RPUSH', KEYS[3], ARGV[2 * i - 1] .. ':' .. ARGV[2 * i])
end
redis.call('PEXPIRE', KEYS[3], ARGV[4])
redis.call('HSET', KEYS[2], ARGV[2], string.format('%.0f:0:%.0f:%s', version, count, ARGV[6]))
return {'OK', 0, count}
