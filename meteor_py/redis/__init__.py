"""Access to the server: connections, keys, scripts, and errors for its replies.

``connector`` is a client's access to its server or cluster, and ``connection`` is one connection.
``keys`` documents every key and field. ``scripts`` lists the Lua scripts in ``lua/``.
"""
