"""Messages between the members of a peer group: requests, inboxes, handlers, replies."""
