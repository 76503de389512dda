-- 5. Assign dead letters to this consumer; reassign those that are not published within a lease.
local letters_out = {}
if not scan_only and ARGV[5] ~= 'leave' and call('EXISTS', KEYS[11]) == 1 then
  local found = call('ZRANGEBYSCORE', KEYS[11], '-inf', format('%.0f', now), 'LIMIT', 0, 16)
  for _, o in ipairs(found) do
    call('ZADD', KEYS[11], now + lease, o)
    letters_out[#letters_out + 1] = o
    letters_out[#letters_out + 1] = call('HGET', KEYS[12], o)
  end
end

-- 6. Write back.
write_held()
local set, gone = {}, {}
for k, t in pairs(states) do
  local raw = t.c
  if t.w > 0 then
    raw = raw .. ':' .. t.w .. ':' .. t.st .. ':' .. head_of(k, t)
  elseif t.st ~= '' then
    raw = raw .. ':0:' .. t.st .. ':'
  end
  if raw ~= (t.raw or '') then
    if raw == '' then
      gone[#gone + 1] = k
    else
      set[#set + 1] = k
      set[#set + 1] = raw
    end
  end
end
many('HSET', KEYS[4], set)
many('HDEL', KEYS[4], gone)
local state = scan_only and {} or {'last', text(now)}
if nxt ~= nxt0 then
  state[#state + 1] = 'next'
  state[#state + 1] = text(nxt)
end
if waiting ~= waiting0 then
  state[#state + 1] = 'waiting'
  state[#state + 1] = waiting
end
if want == 0 and alone ~= '' and call('HLEN', KEYS[14]) == (alone == 'reserved' and 2 or 1) then
  woken = true  -- this consumer may claim more, now that all else is settled
end
if waiting0 >= room and waiting < room then woken = true end
if ARGV[5] == 'wake' and call('EXISTS', KEYS[15]) == 1 then woken = true end
if woken or (freed and call('EXISTS', KEYS[5]) == 1) then
  bell = bell + 1
  call('XADD', KEYS[13], 'MAXLEN', '=', 8, text(bell) .. '-0', 'c', cid)
  state[#state + 1] = 'bell'
  state[#state + 1] = text(bell)
end
if #state > 0 then call('HSET', KEYS[3], unpack(state)) end
for counter, n in pairs(counters) do if n ~= 0 then call('HINCRBY', KEYS[3], counter, n) end end
if not scan_only and ARGV[5] ~= 'leave' then
  call('HSET', KEYS[9], cid, format('%s:%s:%s', ARGV[4], alone, name))
end

local wait = -1
if got == 0 and not scan_only then
  for _, key in ipairs({KEYS[7], KEYS[8], KEYS[11]}) do
    for i, score in ipairs(call('ZRANGE', key, 0, 1, 'WITHSCORES')) do
      if i % 2 == 0 and (key ~= KEYS[8] or tonumber(score) ~= now + lease) then
        local left = max(tonumber(score) - now, 1)
        wait = wait < 0 and left or min(wait, left)
      end
    end
  end
end
local base, steps = granted[1] or 0, {}
for i = 1, got do steps[i] = granted[i] - base end
return {'OK', nxt, stream_end, waiting, bell, wait, base, table.concat(steps, ','),
        table.concat(failed, ','), stored_stop, table.concat(refused, ','), table.concat(lost, ','),
        table.concat(dropped, ','), letters_out, tonumber(m[4])}
