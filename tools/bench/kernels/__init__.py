"""`axl bench block_sizes`: block sizes of paged attention, timed on a TPU."""
