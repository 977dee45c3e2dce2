"""Training: the loop and its operations, programs, losses, evaluators, and the supervised trainer."""
