"""What keeps a long run honest: goodput, watchdog, profiler, recompilation, bit check, metrics and their writers."""
