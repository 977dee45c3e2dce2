"""The demo and its family, an application of its own. README.md says what is here."""
