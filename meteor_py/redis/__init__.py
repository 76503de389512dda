"""The server: connections, keys, scripts and the errors that its replies stand for.

``connector`` is the way to one server and ``connection`` one connection to it. ``keys`` documents
every key and field. ``scripts`` lists the Lua scripts in ``lua/``.
"""
