"""The study of docs/benchmarks/train-step.md: our trainer beside a script in plain JAX, and MaxText."""
