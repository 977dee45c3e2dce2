"""A vLLM server follows the parameter server: greedy tokens of each version, refused damage, a server that is gone.

The server itself runs where AXL_VLLM_PYTHON names the interpreter of an environment with vLLM (tests/peers/README.md).
"""

import ast
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from axlearn_like.checkpoint.arrays import SavedParams
from axlearn_like.checkpoint.checkpointer import Checkpointer
from mesh.errors import UserError
from models.huggingface.checkpoints.exporting import ExportedTokenizer, export_checkpoint
from models.huggingface.convert import abstract_params, to_huggingface
from models.tiny import tiny
from rl.parameter_server.client import ParameterServerClient, connect_local
from rl.parameter_server.pull.vllm.mirror import Mirror, Sent, VllmServer, like_of, write_plugin
from rl.parameter_server.server import ParameterServer
from rl.protocol.messages import Prompt
from rl.rollout.engine import RolloutEngine
from rl.rollout.request import Request
from rl.rollout.sampling import Sampler
from tests.axlearn_like.layers.small import initialise

PYTHON = os.environ.get("AXL_VLLM_PYTHON", "")
POLICY = tiny(vocab_size=256, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32, hidden=256)
PROMPTS = [np.arange(3 + n, 20 + 3 * n, dtype=np.int32) for n in range(4)]
NEW = 12


def params_of(seed: int) -> Any:
    return initialise(POLICY, seed)[1]


@pytest.fixture
def weights() -> Iterator[ParameterServerClient]:
    server = ParameterServer.Config().build()
    client = connect_local(server)
    for version in range(3):
        assert client.publisher().publish_async(params_of(version), version).wait()
    yield client
    client.close()
    server.close()


@pytest.mark.slow
def test_a_version_is_pulled_as_it_was_published(weights: ParameterServerClient) -> None:
    like = like_of(weights.directory.manifest(2))
    assert jax.tree.structure(like) == jax.tree.structure(abstract_params(POLICY))
    pulled = weights.receiver(like).pull(2)
    jax.tree.map(np.testing.assert_array_equal, pulled, params_of(2))


def test_the_plugin_is_found_by_its_metadata_and_runs_on_pythons_of_vllm(tmp_path: Path) -> None:
    write_plugin(tmp_path)
    (found,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (point,) = found.entry_points
    assert (point.group, point.value) == ("vllm.general_plugins", "axl_weights:register")
    tree = ast.parse((tmp_path / "axl_weights.py").read_text(), feature_version=(3, 11))
    assert "register" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_a_server_that_dies_is_no_error_of_the_mirror(weights: ParameterServerClient, tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        gone = VllmServer(f"http://127.0.0.1:{server.getsockname()[1]}")  # nobody listens
    mirror = Mirror(weights, partial(to_huggingface, cfg=POLICY), gone, tmp_path)
    with pytest.raises(OSError):
        mirror.send(0)
    looks = iter([False, True])
    mirror.run(lambda: next(looks))  # waits, and looks again
    assert not list(tmp_path.iterdir())


def test_a_server_that_is_not_there_is_waited_for_and_one_without_the_routes_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    assert VllmServer(url).label() is None
    (tmp_path / "index.html").write_text("x")
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as other:
        assert other.stdout is not None
        port = other.stdout.readline().split("port ")[1].split()[0]
        with pytest.raises(UserError, match="weight_info answers 404; start it with VLLM_SERVER_DEV_MODE=1"):
            VllmServer(f"http://127.0.0.1:{port}").label()
        other.kill()


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    if not PYTHON:
        pytest.skip("AXL_VLLM_PYTHON names no environment with vLLM")
    folder = tmp_path_factory.mktemp("vllm")
    saver = Checkpointer.Config(asynchronous=False).build(directory=folder / "checkpoints")
    saver.save(0, {"params": params_of(9), "step": np.int32(0)}, {})
    saver.close()
    tokenizer = ExportedTokenizer(ids={"eos_token_id": 255})
    export_checkpoint(SavedParams(folder / "checkpoints"), POLICY, folder / "model", tokenizer=tokenizer)
    write_plugin(folder / "plugin")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"-m vllm.entrypoints.cli.main serve {folder / 'model'} --host 127.0.0.1 --port {port} --dtype float32"
    words += " --enforce-eager --max-model-len 256 --max-num-seqs 8 --skip-tokenizer-init --served-model-name policy"
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_HOST_IP": "127.0.0.1"}
    settings |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(folder / "plugin")}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [PYTHON, *words.split(), "--weight-transfer-config", '{"backend":"axl"}'],
            env={**os.environ, **settings},
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        server, deadline = VllmServer(f"http://127.0.0.1:{port}"), time.monotonic() + 270
        while server.label() is None:
            log = (folder / "log").read_text()
            assert process.poll() is None and time.monotonic() < deadline, log[-3000:]
            time.sleep(1.0)
        yield server
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def greedy_there(server: VllmServer) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        asked = {"model": "policy", "prompt": prompt.tolist(), "max_tokens": NEW, "temperature": 0.0}
        asked |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            found.append(json.loads(reply.read())["choices"][0]["token_ids"])
    return found


def greedy_here(version: int) -> list[list[int]]:
    engine = RolloutEngine.Config(
        model=POLICY, stop_tokens=(), max_prompt_tokens=32, max_new_tokens=NEW, max_num_seqs=4
    ).build()
    engine.set_weights(params_of(version), version)
    greedy = Sampler.Config(temperature=0.0)
    requests = [Request(Prompt(n, "digits", prompt), sampler=greedy) for n, prompt in enumerate(PROMPTS)]
    return [rollout.tokens.tolist() for rollout in engine.generate(requests)]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_each_version_draws_there_what_it_draws_here(
    vllm: VllmServer, weights: ParameterServerClient, tmp_path: Path
) -> None:
    sent: list[Sent] = []
    mirror = Mirror(weights, partial(to_huggingface, cfg=POLICY, tied=True), vllm, tmp_path, sent.append)
    tokens = []
    for version in (0, 1):
        done = mirror.send(version)
        assert vllm.label() == done.label == f"{version}-{weights.directory.manifest(version).checksum}"
        print(done)
        tokens.append(greedy_there(vllm))
        assert tokens[-1] == greedy_here(version)
    assert tokens[0] != tokens[1] and not list(tmp_path.iterdir())

    # A file without the announced contents leaves the server as it was.
    tensors = to_huggingface(params_of(2), POLICY, tied=True)
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(UserError, match="version 2-x was not loaded"):
        vllm.load(tmp_path / "bad.safetensors", dict.fromkeys(tensors, "00" * 16), "2-x")
    vllm._call("resume")
    assert greedy_there(vllm) == tokens[1] and vllm.label() == done.label

    # The loop brings a server that is behind to the newest version.
    mirror.run(lambda: bool(sent))
    assert sent[0].version == 2 and greedy_there(vllm) == greedy_here(2)
