"""Sources of durations and failures: the compiler, a run whose roles shared a host, published traces."""
