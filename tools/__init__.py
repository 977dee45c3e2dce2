"""The command line ``axl`` and the packages that only it uses: commands, reports, benchmarks, studies."""
