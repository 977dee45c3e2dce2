"""Elastic training: processes that each hold the whole state, sum gradients in a fixed tree, and come and go."""
