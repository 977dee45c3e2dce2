"""The parameter server: versions of the weights, kept in memory, published atomically, never reused."""

import threading
from collections import OrderedDict

from axlearn_like.config import ConfigBase, Configurable
from rl.weights.encoding import EncodedWeights, Manifest, WeightsError, verify


class ParameterServer(Configurable):
    """Holds the newest `keep` versions. Safe to call from several threads.

    A push is verified before it becomes visible, so a reader sees a whole version or none. Pushing a version again is
    fine if it is the same to the bit (a trainer that restarts publishes before it asks for data) and an error if not.
    """

    class Config(ConfigBase["ParameterServer"]):
        keep: int = 4
        host: str = "127.0.0.1"  # where the bytes are served
        port: int = 0  # 0: any free port

    def __init__(self, cfg: Config):
        self.cfg = cfg
        self._versions: OrderedDict[int, EncodedWeights] = OrderedDict()
        self._checksums: dict[int, str] = {}
        self._changed = threading.Condition()

    def push(self, weights: EncodedWeights) -> None:
        """Publish a version.

        Raises:
            WeightsError: damaged bytes, a version id that was used for other weights, or one that is too old.
        """
        verify(weights)
        version, checksum = weights.manifest.version, weights.manifest.checksum
        with self._changed:
            known = self._checksums.setdefault(version, checksum)
            if known != checksum:
                raise WeightsError(
                    f"version {version} was published before with checksum {known}; "
                    f"refusing other weights under the same number ({checksum})"
                )
            if len(self._versions) >= self.cfg.keep and version < min(self._versions):
                raise WeightsError(f"version {version} is older than all that are kept (held: {self._held()})")
            self._versions[version] = weights
            while len(self._versions) > self.cfg.keep:
                del self._versions[min(self._versions)]
            self._changed.notify_all()

    def rewind(self, version: int) -> None:
        """The trainer restarted from this version: forget every later one, they will be made again."""
        with self._changed:
            for later in [v for v in self._checksums if v > version]:
                del self._checksums[later]
                self._versions.pop(later, None)

    def latest(self) -> int:
        """The newest version held, or -1."""
        with self._changed:
            return max(self._versions, default=-1)

    def oldest(self) -> int:
        """The oldest version held, or -1."""
        with self._changed:
            return min(self._versions, default=-1)

    def pull(self, version: int, timeout: float = 0.0) -> EncodedWeights:
        """The weights of exactly this version, waiting up to `timeout` seconds for its publication.

        Raises:
            WeightsError: not there in time; says what is.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: version in self._versions, timeout):
                raise WeightsError(
                    f"parameter server: version {version} not published within {timeout:g} s (held: {self._held()})"
                )
            return self._versions[version]

    def manifests(self) -> list[Manifest]:
        """What is held, oldest first."""
        with self._changed:
            return [self._versions[version].manifest for version in sorted(self._versions)]

    def _held(self) -> str:
        return ", ".join(map(str, sorted(self._versions))) or "none"
