"""A service that is killed, with clients that wait, and started again: they go on, and learn to the bit as without."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tinker
from tinker import types

from tests.rl.serving.service.real import BASE, base_weights, real_service
from tests.rl.serving.service.test_loops import as_row
from tests.rl.serving.service.wire.running import KEYS

STEPS, KILLS = 6, (1, 4)  # steps, and those during which it is killed
PROMPT = types.ModelInput.from_ints([1, 2, 3])


class Process:
    """A service process."""

    def __init__(self, folder: Path, port: int):
        command = [sys.executable, "-m", "tests.rl.serving.service.real", str(folder), str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.mark.full
def test_clients_go_on_after_a_kill_and_learn_the_same(tmp_path: Path):
    with real_service(tmp_path / "calm") as served:
        expected = learn(served.client("alice"), lambda step: None), learn(served.client("bob"), lambda step: None)
    base_weights(tmp_path / "killed" / "base")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    services = [Process(tmp_path / "killed", port)]

    def kill(step: int) -> None:
        if step in KILLS:
            services[-1].kill()
            services.append(Process(tmp_path / "killed", port))

    try:
        url = f"http://127.0.0.1:{port}"
        clients = [tinker.ServiceClient(base_url=url, api_key=KEYS[tenant]) for tenant in ("alice", "bob")]
        found = learn(clients[0], kill), learn(clients[1], lambda step: None)
    finally:
        services[-1].kill()
    assert found == expected


def learn(client: tinker.ServiceClient, disturb: Callable[[int], None]) -> list[object]:
    """Train a model for some steps; returns every loss, and what it draws at the end. `disturb` is called within."""
    model = client.create_lora_training_client(base_model=BASE, rank=4, seed=3).result()
    found: list[object] = []
    for step in range(STEPS):
        rows = [as_row([1, 2, step], [4, 5, 6 + step], weights=[1.0, 1.0, 0.5])]
        passed = model.forward_backward(rows, "cross_entropy")
        stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
        if step % 2:
            passed.result()  # killed with and without an answer
        disturb(step)
        found.append(passed.result().metrics["loss:sum"])
        found.append(stepped.result().metrics)
    sampler = model.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(PROMPT, 4, types.SamplingParams(max_tokens=8, seed=1)).result()
    return [
        *found,
        [list(one.tokens) for one in drawn.sequences],
        [list(one.logprobs or []) for one in drawn.sequences],
    ]
