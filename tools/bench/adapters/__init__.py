"""`axl bench adapters`: many LoRA adapters in one batch."""
