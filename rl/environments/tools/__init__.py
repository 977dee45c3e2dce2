"""Tools that a policy may call: calculator, Python, SQL, retrieval, and functions of the user's own."""
