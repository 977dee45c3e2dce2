"""Workers of the peers that benchmarks compare with, each with its own packages in its own environment."""
