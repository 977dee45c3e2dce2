"""Compiled programs of a process: kept on disk, compiled later, and shared by all who compute the same."""
