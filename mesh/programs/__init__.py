"""Compiled programs of a process: kept on disk, compiled elsewhere or later, and shared by all who compute the same."""
