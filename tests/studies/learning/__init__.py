"""A study of docs/benchmarks/learning.md: what each objective learns from one supervised start."""
