"""Files that others may have made or can reach: read within bounds, written without following links, and caches."""
