"""Speculative decoding: drafts of what a sequence goes on with, verified by the draws of the policy itself."""
