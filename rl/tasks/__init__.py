"""Tasks: problem families, their mixture, and examples for supervised training."""
