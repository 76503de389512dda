#!lua flags=allow-oom
-- Look at polls: at one, or at those that a member who was not there has to know of.
--
-- KEYS  1 what the keys of the group begin with
-- ARGV  1 'poll' or 'member'  2 its id
-- Returns {'OK', ms left to vote in, fields and values of a poll, as in its events, ...}; nothing if
--   there is none; or {'NOGROUP'}. Of a member: those that it was asked in and has not voted, and
--   those that agreed on something to be done, which it was asked in; 200 of each at most.
-- Atomic because it also closes what is over, so that somebody does.

local answer = {'OK'}
local function add(id)
  local fields = describe(id)
  if not fields then return end
  local ends = tonumber(call('ZSCORE', POLLS, id) or 0)
  local limit = tonumber(call('ZSCORE', LIMITS, id) or ends)
  answer[#answer + 1] = max(min(ends, limit) - now, 0)
  answer[#answer + 1] = fields
end
if ARGV[1] == 'poll' then
  add(ARGV[2])
  return answer
end
for _, id in ipairs(call('ZRANGE', POLLS, 0, 999)) do
  if #answer < 400 and call('HGET', P .. 'votes:' .. id, ARGV[2]) == '-' then add(id) end
end
local pending = call('HVALS', PENDING)
for i = 1, min(#pending, 200) do
  local id = match(pending[i], '^(.-):')
  if call('HGET', P .. 'poll:' .. id, 'result') == 'yes'
     and call('HEXISTS', P .. 'votes:' .. id, ARGV[2]) == 1 then
    add(id)
  end
end
return answer
