"""Bodies of responses: text and calls as they arrive, log-probabilities, choices and chunks."""
