"""Updates of past runs, made again from their directories, and the first difference of two runs."""
