"""Agent loops: what each sample does on the engine, beyond generating once."""
