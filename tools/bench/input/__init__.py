"""`axl bench input`: speed of the input pipeline."""
