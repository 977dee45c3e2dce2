"""The tokenizer of `experiments.small_llama`: 2,048 tokens, trained by `axl data train-tokenizer`."""
