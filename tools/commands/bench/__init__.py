"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from tools.bench.harness.checkout import IN_CHECKOUT, of_checkout
from tools.commands.bench import commands
from tools.commands.bench.group import command

if IN_CHECKOUT:
    of_checkout("commands", "axl bench")

__all__ = ["command", "commands"]
