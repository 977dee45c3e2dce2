"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from tools.commands.bench import policies, rollout, training
from tools.commands.bench.group import command

__all__ = ["command", "policies", "rollout", "training"]
