"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from tools.commands.bench import bisect, rollout, sectioned, training
from tools.commands.bench.group import command

__all__ = ["bisect", "command", "rollout", "sectioned", "training"]
