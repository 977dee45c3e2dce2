"""Alignment by supervised training: losses that compare a policy with a reference, and the policies compared with."""
