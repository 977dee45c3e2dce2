"""Operations of a long run: goodput, watchdog, profiler, recompilation guard, SDC check, metrics and their writers."""
