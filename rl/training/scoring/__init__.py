"""Log-probabilities beside the update: those of the sampler to compare with, and those of a reference policy."""
