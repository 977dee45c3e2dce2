"""The trainer's side: host copies of versions, and their publication."""
