"""Models in Hugging Face's form: architectures by config.json, and tables of tensor names; both directions."""
