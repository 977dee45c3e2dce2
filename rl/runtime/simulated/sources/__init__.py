"""Sources of durations: the compiler, and a run whose roles shared the cores of one host."""
