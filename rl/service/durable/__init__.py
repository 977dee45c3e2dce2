"""What a service keeps on disk, so that a kill loses nothing that was accepted."""
