"""Mathematics that is compared exactly, without sympy."""
