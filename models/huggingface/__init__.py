"""Models in Hugging Face's form: architectures by config.json, and tables of tensor names; both directions."""

from models.huggingface.policy import hf, hf_weights

__all__ = ["hf", "hf_weights"]
