"""Paged attention on TPUs: kernels that write new keys and values into pages, and attend to all of them."""
