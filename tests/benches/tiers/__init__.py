"""`axl bench tiers`: pages on the host against computing again, moved requests, codecs of tensors, and slow links."""
