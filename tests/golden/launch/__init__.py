"""Golden files of `axl launch`: what it writes, what it sends, and what the official clients send."""
