"""Rows of files in the forms that people have: tables of any format, messages, and which column is what."""
