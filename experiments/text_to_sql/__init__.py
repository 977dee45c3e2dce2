"""Text to SQL: an application of its own. README.md says what is here."""
