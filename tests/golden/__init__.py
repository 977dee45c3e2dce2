"""Scripts that make the golden files of the tests, each run by the packages of an environment of its own."""
