"""A service that trains and samples many LoRA adapters of one base, programmed by the verbs of the Tinker API."""
