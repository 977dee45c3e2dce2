"""Files of tensors in Hugging Face's form: found in a directory, their headers checked, read and written."""
