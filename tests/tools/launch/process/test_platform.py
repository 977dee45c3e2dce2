"""Variables of platforms beside the arguments of a process: jax's own detection of clusters is given the same ones."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from jax._src.clusters import cloud_tpu_cluster as clusters

from tools.launch.local.cluster import slice_variables
from tools.launch.process.machine import corrected

FIRST = "run-trainer-node-0-0.run-trainer"
HOSTS = "run-trainer-node-1-0.run-trainer,run-trainer-node-1-1.run-trainer"
ONE: dict[str, str] = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": f"{FIRST},run-trainer-node-0-1.run-trainer"}
# Slice 1 of two, as GKE says it and as the cluster on this machine does.
TWO = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": HOSTS, **slice_variables(2, "1", FIRST)}
STALE = {**TWO, "MEGASCALE_SLICE_ID": "0", "MEGASCALE_COORDINATOR_ADDRESS": "run-trainer-node-0-0-old:8080"}


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The metadata server of a machine: attributes by name."""
    attributes: dict[str, str] = {"tpu-env": ""}

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            content = attributes.get(self.path.rpartition("/")[2], "").encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_address[1]}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(clusters, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(clusters.BaseTpuCluster, "wait_for_coordinator", lambda *_: None)
    for name in (*TWO, "TPU_SKIP_MDS_QUERY", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH"):
        monkeypatch.delenv(name, raising=False)
    yield attributes
    server.shutdown()
    server.server_close()


def detected(cluster: Any) -> tuple[int, int, str]:
    """Return process, number of processes and address of the first, as `jax.distributed.initialize()` finds them."""
    assert cluster.is_env_present()
    return cluster.get_process_id(), cluster.get_process_count(), cluster.get_coordinator_address(1, None)


@pytest.mark.parametrize("lists", ["TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "TPU_PROCESS_ADDRESSES_PATH"])
@pytest.mark.parametrize(("given", "index", "count"), [(ONE, 1, 2), (TWO, 3, 4)])
def test_jax_finds_on_gke_what_we_read_of_the_same_variables(
    lists: str,
    given: dict[str, str],
    index: int,
    count: int,
    metadata: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    variables = {name: value for name, value in given.items() if name != "TPU_WORKER_HOSTNAMES"}
    variables[lists] = given["TPU_WORKER_HOSTNAMES"]
    if lists.endswith("_PATH"):
        (tmp_path / "hosts").write_text(f"{variables[lists]}\n")
        variables[lists] = str(tmp_path / "hosts")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert detected(clusters.GkeTpuCluster) == (index, count, f"{FIRST}:{clusters.coordinator_port}")
    longer = f"{FIRST}.default.svc"  # the same host
    assert corrected(variables, count // 2, index // 2, longer) == variables


def test_stale_variables_are_corrected_for_jax_and_libtpu(metadata: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in corrected({**STALE, "OTHER": "1"}, 2, 1, FIRST).items():
        monkeypatch.setenv(name, value)
    assert detected(clusters.GkeTpuCluster) == (3, 4, f"{FIRST}:{clusters.coordinator_port}")
    # A slice by itself, which was one of several in an earlier life.
    assert corrected({**TWO, "OTHER": "1"}, 1, 0, None) == {
        "TPU_WORKER_ID": "1",
        "TPU_WORKER_HOSTNAMES": HOSTS,
        "OTHER": "1",
    }
    assert corrected({"OTHER": "1"}, 2, 1, FIRST) == {"OTHER": "1"}, "nothing is made up"


@pytest.mark.parametrize("endpoints", ["a:READY:10.0.0.7,b:READY:10.0.0.8", "10.0.0.7,10.0.0.8"])
@pytest.mark.parametrize(
    ("tpu_env", "index", "count", "first"),
    [
        ("ACCELERATOR_TYPE: 'v5p-16'\n", 1, 2, "10.0.0.7"),
        (
            "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.1:8080'\n",
            *(3, 4, "10.0.0.1"),
        ),
    ],
)
def test_jax_finds_on_machines_of_a_queued_resource_what_our_script_does(
    endpoints: str, tpu_env: str, index: int, count: int, first: str, metadata: dict[str, str]
):
    """`test_the_startup_script_finds_its_place` reads the same attributes."""
    metadata |= {"agent-worker-number": "1", "worker-network-endpoints": endpoints, "tpu-env": tpu_env}
    assert detected(clusters.GceTpuCluster) == (index, count, f"{first}:{clusters.coordinator_port}")
