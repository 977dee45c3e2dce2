"""`axl bench recovery`: time from a kill to the next update."""
