"""Losses of a decoder's head in parts, so that the logits of all tokens never exist at once."""
