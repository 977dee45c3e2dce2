"""The command line ``axl`` and what only it needs: commands, reports, benchmarks, installation."""
