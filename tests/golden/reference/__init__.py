"""Makers of what Hugging Face transformers computes, reads and defaults to; run by an environment that has it."""
