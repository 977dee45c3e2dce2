"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from tools.commands.bench import inference, rl, training
from tools.commands.bench.group import command

__all__ = ["command", "inference", "rl", "training"]
