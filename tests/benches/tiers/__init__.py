"""`axl bench tiers`: pages on the host against computing again, moved requests, and codecs of tensors."""
