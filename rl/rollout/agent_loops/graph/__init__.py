"""Skeleton graph decoding: a plan whose lines depend on each other, decoded as far in parallel as they allow."""
