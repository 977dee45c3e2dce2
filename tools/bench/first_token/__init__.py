"""From a model's files to its first token: `axl convert import` and `axl serve` beside transformers."""
