"""A Ray cluster of several machines, which are nodes on this one, each with a loopback address of its own."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from rl.runtime.node.start import few_processes

Machine = tuple[Mapping[str, Any], Mapping[str, str]]


@contextmanager
def machines(head: Mapping[str, Any], others: Sequence[Machine], everywhere: Mapping[str, str]) -> Iterator[Any]:
    """Start a head, where the driver is, and the others, and join them.

    No process of a node is started that only holds what runs do not use (see `few_processes`), and none in advance: an
    actor that asks for no CPU finds a place on a node without any.

    Args:
        head: resources of the head.
        others: resources of each machine, and variables of its environment.
        everywhere: variables of all machines.
    """
    ray, Cluster = importlib.import_module("ray"), importlib.import_module("ray.cluster_utils").Cluster
    own = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": "127.0.0.1"}
    with _variables(everywhere):
        made = Cluster(initialize_head=True, head_node_args={**own, **head})
    try:
        for number, (resources, variables) in enumerate(others):
            with _variables({**everywhere, **variables}):
                made.add_node(num_cpus=0, node_ip_address=f"127.0.0.{2 + number}", **resources)
        ray.init(made.address, log_to_driver=False, _node_ip_address="127.0.0.1")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set what Ray reads of the environment of the process that starts a node."""
    with few_processes(), pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        yield
