"""The contract between the roles: their messages, the methods that they call on each other, and their timeouts."""
