"""The small supervised job of `axl doctor`, and of the study of the train step."""
