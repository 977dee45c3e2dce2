"""Tiers of the KV cache below the device: pages in host memory and in a file on a local disk."""
