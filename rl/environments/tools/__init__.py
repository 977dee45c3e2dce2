"""Tools that a policy may call: calculator, Python, retrieval, and functions of the user's own."""
