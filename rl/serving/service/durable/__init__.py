"""State of a service on disk, so that a kill loses nothing that was accepted."""
