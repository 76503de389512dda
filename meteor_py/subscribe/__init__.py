"""Reading a stream: alone, or for a subscriber group.

``subscriber`` is the public class. It reads through ``fetcher`` and ``read_buffer`` from a
``LogReader``. In a group, ``group_session`` holds the ``lease``, ``renewal_thread`` renews it, and
``offset_confirms`` merges confirmed offsets. ``receiver`` passes records to a handler, and
``dead_letters`` publishes those that the handler cannot process. ``group_admin`` lists, moves and
deletes groups.
"""
