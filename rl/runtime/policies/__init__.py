"""Several policies on one fleet: LoRA adapters of one base, each with the bits that it would have had alone."""
