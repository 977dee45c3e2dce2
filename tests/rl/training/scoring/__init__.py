"""Tests of rl/training/scoring."""
