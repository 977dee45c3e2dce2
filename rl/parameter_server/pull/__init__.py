"""The workers' side: reading, verifying and prefetching versions."""
