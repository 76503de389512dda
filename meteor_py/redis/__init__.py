"""Access to the server: connections, keys, scripts, and errors for its replies.

``connector`` connects to one server, and ``connection`` is one connection to it. ``keys`` documents
every key and field. ``scripts`` lists the Lua scripts in ``lua/``.
"""
