"""Reuse of keys and values of a text behind another context (KVCOMM)."""
