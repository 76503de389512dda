-- 7. Write the changes, and reply.
-- Library shared/_write is inserted here.
c.step, c.report = number, ''
if #failed + #refused + #lost + #dropped > 0 then
  c.report = concat({concat(failed, ','), concat(refused, ','), concat(lost, ','), concat(dropped, ',')},
                    ';')
end
write_member(me, c)
return {'OK', pack(REPLY, p.next, stream_end, c.first, stored_stop, maintenance_due, idle, wait,
                   tonumber(stream[3])), sent, c.report, stream[4]}
