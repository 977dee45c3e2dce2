"""Weights on the move: how a version of the parameters is encoded, and how its bytes travel."""
