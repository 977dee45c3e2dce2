"""Matrices of low rank in the place of parameters: factors that an engine holds, and what adapters add."""
