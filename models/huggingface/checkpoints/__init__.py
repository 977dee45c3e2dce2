"""Checkpoints in Hugging Face's form on disk: checked, imported, exported, and read onto devices."""
