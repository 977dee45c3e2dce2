"""Retrieval for many tenants: each sees its own documents and those shared with it, in one index."""
