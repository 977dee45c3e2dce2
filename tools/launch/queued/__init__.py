"""Queued resources of the Cloud TPU API: v4, v5e, v5p and v6e slices without a cluster."""
