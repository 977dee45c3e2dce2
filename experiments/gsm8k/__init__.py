"""GSM8K, grade-school problems in words: an application of its own. README.md says what is here."""
