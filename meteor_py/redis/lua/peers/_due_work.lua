-- For scripts that call no function of _group_state.lua. They run that library only if work is due.

if now >= due then
  -- Library peers/_messages is inserted here.
  -- Library peers/_group_state is inserted here.
end
