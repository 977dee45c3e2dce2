"""Contexts of attention: what each token may attend to, and where keys and values are stored."""
