"""Opening of a run directory: its owner, the config that goes on with it, and the state before, to be put back."""
