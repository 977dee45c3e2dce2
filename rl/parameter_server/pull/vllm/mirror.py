"""Mirror of a run's weights in a vLLM server: every new version is pulled, converted, sent and checked.

The server is started with `VLLM_SERVER_DEV_MODE=1`, with the plugin of `write_plugin` on its PYTHONPATH, and with
`--weight-transfer-config '{"backend": "axl"}'`. It pauses for the load alone. A server that was restarted gets the
newest version again.
"""

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from axlearn_like.layers.base import Params
from mesh.errors import UserError
from rl.parameter_server.client import ParameterServerClient
from rl.parameter_server.errors import WeightsError
from rl.parameter_server.manifest import Manifest

_PLUGIN = Path(__file__).with_name("axl_weights.py.txt")
_START = "start it with VLLM_SERVER_DEV_MODE=1, the plugin on PYTHONPATH and --weight-transfer-config"
_WAIT = 2.0  # seconds that one request for newer versions waits


class Sent(NamedTuple):
    """One version in the server, and the seconds that each phase took; requests waited for `pause` alone."""

    version: int
    label: str
    bytes: int
    pull: float
    write: float
    pause: float


class VllmServer:
    """Client of the weight routes of a vLLM server (0.32)."""

    def __init__(self, url: str, timeout: float = 300.0):
        """`url`: such as http://127.0.0.1:8000; `timeout`: seconds of one request."""
        self.url, self._timeout = url.rstrip("/"), timeout

    def label(self) -> str | None:
        """Return the label of the server's weights; None: nobody answers (UserError: it has no weight routes)."""
        try:
            return str(self._call("weight_info", post=False).get("weight_version"))
        except urllib.error.HTTPError as error:
            raise UserError(f"{self.url}/weight_info answers {error.code}; {_START}") from error
        except OSError:
            return None

    def load(self, path: Path, digests: Mapping[str, str], label: str) -> float:
        """Pause, load a file, label the weights, resume; return the seconds of the pause.

        Requests in flight go on afterwards, with the new weights.

        Raises:
            UserError: the load failed. The server stays paused: no request is answered by weights of two versions.
            OSError: the server does not answer any more.
        """
        began = time.monotonic()
        try:
            self._call("pause?mode=keep")
            self._call("init_weight_transfer_engine", init_info={})
            self._call("start_weight_update")
            self._call("update_weights", update_info={"path": str(path), "digests": dict(digests)})
            self._call("finish_weight_update", weight_version=label)
            self._call("reset_prefix_cache")
            self._call("resume")
        except urllib.error.HTTPError as error:
            time.sleep(_WAIT)
            self._call("is_paused", post=False)  # an engine that has died takes its server along
            raise UserError(
                f"{self.url}: version {label} was not loaded ({error}); the server is left paused, its log has the "
                f"reason; {_START}, and that of this version of the project"
            ) from error
        return time.monotonic() - began

    def _call(self, route: str, *, post: bool = True, **fields: Any) -> dict[str, Any]:
        body = json.dumps(fields).encode() if post else None
        request = urllib.request.Request(f"{self.url}/{route}", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=self._timeout) as reply:
            text = reply.read()
        return json.loads(text) if text.strip() else {}


class Mirror:
    """Loop that keeps a server at the newest version."""

    def __init__(
        self,
        weights: ParameterServerClient,
        convert: Callable[[Params], Mapping[str, np.ndarray]],
        server: VllmServer,
        folder: Path,
        say: Callable[[Sent], object] = lambda sent: None,
    ):
        """Store the settings.

        Args:
            convert: from parameters to tensors under the names of the model that vLLM serves. A tied head is needed
                under its own name too: vLLM 0.32 leaves it as it was if the embedding alone comes (seen on CPU).
            folder: folder that the server's host reads, too; a file of the size of the model is there at a time.
            say: called with each version that was sent.
        """
        self._weights, self._convert, self._server, self._folder, self._say = weights, convert, server, folder, say
        self.abandon: Callable[[], object] = lambda: None  # nothing is on loan

    def run(self, stop: Callable[[], bool]) -> None:
        """Send every version that is the newest when the one before it has been sent, until `stop`."""
        known = -1
        while not stop():
            latest = self._weights.directory.newer(known, _WAIT)
            if latest < 0:
                continue
            at = self._server.label()
            if at is None:
                time.sleep(_WAIT)  # wait for its return
            elif latest > known or at.partition("-")[0] != str(known):  # new, or the server was started again
                try:
                    self._say(self.send(latest))
                    known = latest
                except OSError:
                    continue  # the server has died under the load
                except WeightsError:
                    if latest in self._weights.directory.versions():
                        raise

    def send(self, version: int) -> Sent:
        """Bring the server to a version.

        Raises:
            WeightsError: the version is not there, or damaged.
            UserError: the server could not load it.
            OSError: the server is gone.
        """
        from safetensors.numpy import save_file

        began = time.monotonic()
        manifest = self._weights.directory.manifest(version)
        tensors = self._convert(self._weights.receiver(like_of(manifest)).pull(version))
        pulled = time.monotonic()
        path, digests = self._folder / f"version-{version}-{os.getpid()}.safetensors", {}
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            save_file(dict(tensors), path)
            for name, tensor in tensors.items():
                digests[name] = hashlib.blake2b(tensor.reshape(-1).view(np.uint8), digest_size=16).hexdigest()
            written = time.monotonic()
            pause = self._server.load(path, digests, label_of(manifest))
        finally:
            path.unlink(missing_ok=True)
        total = sum(tensor.nbytes for tensor in tensors.values())
        return Sent(version, label_of(manifest), total, pulled - began, written - pulled, pause)


def label_of(manifest: Manifest) -> str:
    """Return the name of a version in the server: its number, and the checksum of its contents."""
    return f"{manifest.version}-{manifest.checksum}"


def like_of(manifest: Manifest) -> Params:
    """Return the arrays of a version as they were published, on one device."""
    here, like = jax.sharding.SingleDeviceSharding(jax.devices()[0]), {}
    for tensor in manifest.tensors:
        *above, last = tensor.path.split("/")
        node: dict[str, Any] = like
        for key in above:
            node = node.setdefault(key, {})
        node[last] = jax.ShapeDtypeStruct(tensor.shape, np.dtype(tensor.dtype), sharding=here)
    return like


def write_plugin(folder: Path) -> None:
    """Write the plugin for vLLM's PYTHONPATH: the module, and the metadata by which vLLM finds it."""
    about = folder / "axl_weights-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (folder / "axl_weights.py").write_bytes(_PLUGIN.read_bytes())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: axl-weights\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\naxl = axl_weights:register\n")
