"""A process of a launched run, in its container: its rank, its chips, its log, its end (`__main__.py`)."""
