"""The small supervised job of `axl doctor`, of docs/benchmarks/train-step.md and of peers."""
