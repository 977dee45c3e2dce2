"""`axl bench train_step`: the supervised train step beside plain JAX and peers."""
