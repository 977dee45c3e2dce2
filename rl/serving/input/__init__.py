"""Bodies of requests: fields, prompts, sampling parameters, and the engine's requests for them."""
