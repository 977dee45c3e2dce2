"""`axl bench weights`: push, pull and codecs of the parameter server."""
