"""A pull under way does not keep a process that Ctrl-C ends."""

import dataclasses
import json
import sys
import time

import numpy as np
import pytest

from rl.parameter_server.client import connect
from rl.parameter_server.server import ParameterServer
from tests.chaos.proxy import Proxy
from tests.mesh.programs.test_interruptible import seconds_to_end
from tests.rl.parameter_server.small import publish

RATE = 200_000  # bytes a second: the pull takes 100 s
WEIGHTS = {name: np.ones(1_250_000, np.float32) for name in "abcd"}
PULL = """
import json, sys
import jax.numpy as jnp
from rl.parameter_server.client import connect
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.endpoint import Endpoint

endpoint = Endpoint(**json.loads(sys.argv[1]))
client = connect(ParameterServer.Config(shared_memory=False), [lambda: endpoint])
client.receiver({name: jnp.zeros(1_250_000) for name in "abcd"}).pull(0, 600.0)
"""


@pytest.mark.slow
def test_ctrl_c_waits_for_no_pull() -> None:
    server = ParameterServer.Config(shared_memory=False).build()
    here = server.listen()
    client = connect(server.cfg, [server.listen])
    publish(client, WEIGHTS, 0)
    with Proxy(here.port, rate=RATE) as link:
        slow = json.dumps(dataclasses.asdict(dataclasses.replace(here, port=link.port)))

        def pulling(_: object) -> None:
            end = time.monotonic() + 60
            while link.connections < 2:  # that of the directory is one of the two that read
                assert time.monotonic() < end
                time.sleep(0.05)
            time.sleep(1.0)

        seconds, status = seconds_to_end([sys.executable, "-c", PULL, slow], pulling)
    client.close()
    server.close()
    assert status != 0 and seconds < 20
