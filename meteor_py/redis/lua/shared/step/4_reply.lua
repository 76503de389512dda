
-- 6. Write the changes, and reply.
local idle, wait = write_changes(mode, want, got, stop, cut, stored_stop, waits)
c.step, c.report = number, ''
if #failed + #refused + #lost + #dropped > 0 then
  c.report = concat({concat(failed, ','), concat(refused, ','), concat(lost, ','), concat(dropped, ',')},
                    ';')
end
write_member(me, c)
write_progress()
return {'OK', text(p.next), text(stream_end), c.first, sent, c.report, stored_stop, maintenance_due(),
        idle, wait, tonumber(stream[4]), stream[5]}
