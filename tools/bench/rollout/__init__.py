"""`axl bench rollout`: tokens of the rollout engine beside peers."""
