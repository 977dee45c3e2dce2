"""A parameter server whose reads last for as long as a file is there."""

import time
from pathlib import Path
from typing import Any

from rl.parameter_server.rpc import Handle, Reply
from rl.parameter_server.server import ParameterServer
from rl.parameter_server.transport.server import Body


class HeldServer(ParameterServer):
    """A parameter server that answers no read while the file `hold` exists, and makes another file at the first."""

    class Config(ParameterServer.Config):
        hold: str = ""

    def __init__(self, cfg: Config, **place: Any):
        super().__init__(cfg, **place)
        self._hold = Path(cfg.hold)

    def answers(self) -> Handle:
        prompt = super().answers()

        def handle(operation: str, fields: dict[str, Any], body: Body) -> Reply:
            while operation == "read" and self._hold.exists():
                read_began(self._hold).touch()
                time.sleep(0.05)
            return prompt(operation, fields, body)

        return handle


def read_began(hold: Path) -> Path:
    """Return the path of the file that tells of a read."""
    return hold.with_suffix(".read")
