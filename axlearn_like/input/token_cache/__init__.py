"""Files of tokens, and the cache of what an encoding made of text."""
