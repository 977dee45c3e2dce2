"""Tokenizers: what the rest of the stack asks of one (`protocol`), and two that need no files."""
