"""Tables of tensor names and `config.json` of each family, both ways."""
