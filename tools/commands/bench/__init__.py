"""`axl bench NAME`: measure our stack, and peers on the same job, in one run."""

from importlib import import_module

from tools.commands.bench import rollout, sectioned, training
from tools.commands.bench.group import IN_CHECKOUT, command

if IN_CHECKOUT:
    import_module("tests.benches.commands")

__all__ = ["command", "rollout", "sectioned", "training"]
