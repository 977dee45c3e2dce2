"""Log-probability, entropy and KL of a policy's head, without logits in memory."""
