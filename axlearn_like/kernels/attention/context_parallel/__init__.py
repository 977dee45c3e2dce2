"""Context parallelism: attention over rows whose tokens are sharded over devices."""
