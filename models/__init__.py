"""Model families as configs of shared layers, and their weights from and to Hugging Face."""
