"""Attention over a cache in rank space: of factors of keys and values, what one token is multiplied to alone."""
