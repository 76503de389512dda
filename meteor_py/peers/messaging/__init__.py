"""Messages between peer group members: requests, inboxes, handlers and replies."""
