"""`axl bench block_sizes`: block sizes of paged attention, timed on a TPU, or read from its compiler."""
