"""A queued resource that is kept until its run has ended: asked for, watched, deleted and asked for again.

One that was preempted ends SUSPENDED, and keeps name and quota until it is deleted. The run resumes by itself, for its
directory is in the bucket.
"""

import json
import time
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote

from mesh.errors import UserError
from tools.launch.kubernetes.client import Client, Refused

_POLL = 10.0  # seconds
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 600.0  # seconds before a resource is asked for again
_DELETED = 900.0  # seconds
_LOST = ("SUSPENDED", "FAILED")
_GOING = ("SUSPENDING", "DELETING")
LABEL = "axl-run"  # label of a run's machines

Say = Callable[[str], None]
State = Literal["absent", "ACTIVE"] | str


class Keeper:
    """One queued resource, by its name."""

    def __init__(self, client: Client, parent: str, name: str, say: Say, sleep: Callable[[float], None] = time.sleep):
        self._client, self._parent, self._name, self._say, self._sleep = client, parent, name, say, sleep
        self._path = f"/v2/{parent}/queuedResources/{quote(name)}"

    def create(self, request: dict[str, Any]) -> None:
        """Ask for it, in place of one that was lost.

        Raises:
            UserError: there is one that lives or is another's, or the API refuses it (quota, rights, no such type).
        """
        state, _ = self.state()
        if state in (*_LOST, *_GOING):
            self.delete()
        elif state != "absent":
            raise UserError(f"queued resource {self._name} is {state}; `axl launch stop` ends it")
        self._ask(request)

    def keep(self, request: dict[str, Any]) -> None:
        """Return when the run has ended, which deletes the resource; ask again whenever it is lost."""
        pause, said, was_active = _FIRST_PAUSE, "", False
        while True:
            state, why = self.state()
            line = f"{self._name}: {state}{': ' if why else ''}{why}"
            if line != said:
                self._say(line)
                said = line
            if state == "ACTIVE":
                pause, was_active = _FIRST_PAUSE, True
            elif state == "absent" and was_active:
                return
            elif state in _LOST or state == "absent":
                self.delete()
                self._say(f"{self._name}: asked for again in {pause:.0f} s")
                self._sleep(pause)
                pause, was_active = min(2 * pause, _LONGEST_PAUSE), False
                self._ask(request)
            self._sleep(_POLL)

    def state(self) -> tuple[State, str]:
        """Return its state, and why it is in it."""
        found = self._client.find(self._path)
        if found is None:
            return "absent", ""
        state = found.get("state", {})
        name = state.get("state", "STATE_UNSPECIFIED")
        data = next((value for key, value in state.items() if key.endswith("Data") and value), {})
        error = data.get("error", {}).get("message", "")
        waits = "no capacity yet" if name in ("WAITING_FOR_RESOURCES", "ACCEPTED") else ""
        return name, error or waits

    def delete(self) -> bool:
        """Delete it with its machines, and return when its name is free; False: there was none; UserError: not ours."""
        self._check_owner()
        try:
            self._client.request("DELETE", self._path, query={"force": "true"})
        except Refused as error:
            if error.status == 404:
                return False
            if error.status != 409:  # 409: deletion is under way
                raise
        waited = 0.0
        while self.state()[0] != "absent":
            if waited > _DELETED:
                raise UserError(f"queued resource {self._name} is still there after {_DELETED:.0f} s")
            self._sleep(_POLL)
            waited += _POLL
        return True

    def _check_owner(self) -> None:
        """Refuse a resource that `axl launch` has not asked for: it is another's, with its machines (UserError)."""
        found = self._client.find(self._path)
        if found is None:
            return
        specs = found.get("tpu", {}).get("nodeSpec", [])
        runs = {one.get("node", {}).get("labels", {}).get(LABEL) for one in specs}
        if runs != {self._name}:
            raise UserError(
                f"queued resource {self._name} has no label {LABEL}={self._name}: it was not asked for by `axl "
                "launch`, and is left alone; --name gives your run another name"
            )

    def _ask(self, request: dict[str, Any]) -> None:
        path = f"/v2/{self._parent}/queuedResources"
        try:
            self._client.request("POST", path, body=request, query={"queuedResourceId": self._name})
        except Refused as error:
            if error.status == 409:
                raise UserError(f"queued resource {self._name} exists already; `axl launch stop` ends it") from None
            if error.status == 429:
                raise UserError(f"quota: {error}") from None
            raise


def as_text(request: dict[str, Any]) -> str:
    """Return a request as a file."""
    return json.dumps(request, indent=1) + "\n"
