"""The benchmark of `axl bisect`: faults that are injected into one of two equal runs, each to be located."""
