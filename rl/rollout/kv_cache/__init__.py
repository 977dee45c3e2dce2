"""Pages of keys and values: the pool, the prefixes cached in it, and the pages of each sequence."""
