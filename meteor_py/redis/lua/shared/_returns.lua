-- Library of shared/step and shared/maintain: records that come back, and records that fail. The
-- functions are created only when they are needed, because most steps just acknowledge and claim.
local function make_returns()
  local function merge(a, b)
    local all, i, j = {}, 1, 1
    while a[i] or b[j] do
      if a[i] and (not b[j] or a[i] < b[j]) then
        all[#all + 1], i = a[i], i + 1
      else
        all[#all + 1], j = b[j], j + 1
      end
    end
    return all
  end
  local function push_chunks(k, t, all)
    local x, set = extend(t), {}
    if x.far == 0 then x.last = x.first - 1 end
    local high = #all
    while high > NEAR do
      local low = max(high - CHUNK + 1, NEAR + 1)
      x.first, x.far = x.first - 1, x.far + high - low + 1
      set[#set + 1], set[#set + 2] = k .. ':' .. text(x.first), to_line(all, low, high)
      high = low - 1
    end
    many('HSET', KEYS[6], set)
    t.line = to_line(all, 1, NEAR)
  end
  -- Put rising offsets back among those that wait.
  local function put_back(k, t, offsets)
    while t.extended and t.extended.far > 0 do
      local chunk = call('HGET', KEYS[6], k .. ':' .. text(t.extended.first))
      if chunk and unpack_struct('<I7', chunk) > offsets[#offsets] then break end
      pull_chunk(k, t)
    end
    local all = merge(from_line(t.line), offsets)
    if #all > 2 * NEAR + CHUNK then push_chunks(k, t, all) else t.line = to_line(all) end
    p.waiting, p.returned = p.waiting + #offsets, p.returned + #offsets
    if t.held > 0 and not (t.extended and t.extended.stop ~= FREE) then
      extend(t).stop = BEHIND
      tell(t.owner, k)
    end
  end
  -- Give a record up; returns whether it leaves its key.
  local function give_up(o, k, t, reason, failures)
    if parks then extend(t).stop = PARKED end
    if letters then
      call('HSET', KEYS[14], text(o), format('%d:%d:', failures, #k) .. k .. reason)
      call('ZADD', KEYS[15], 0, text(o))
      marks['letter:' .. text(o)], p.due = o, 0
      return true
    end
    if parks then return false end
    healed[#healed + 1], dropped[#dropped + 1] = text(o), text(o) .. ':' .. failures
    p.dead = p.dead + 1
    return true
  end
  local function count_failure(o)
    local failures = call('HINCRBY', KEYS[13], text(o), 1)
    if failures == 1 then p.failing = p.failing + 1 end
    return failures
  end
  local function fail(o, k, t, reason)
    local failures = count_failure(o)
    return tries > 0 and failures >= tries and give_up(o, k, t, reason, failures)
  end
  return put_back, give_up, count_failure, fail
end
