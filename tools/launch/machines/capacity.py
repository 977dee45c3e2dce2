"""Capacity in one word, and its spellings: on-demand, spot, reserved:NAME, flex."""

import dataclasses
import re
from typing import Any, Literal

from mesh import UserError
from mesh.errors import did_you_mean

Kind = Literal["on-demand", "spot", "reserved", "flex"]
_KINDS: tuple[Kind, ...] = ("on-demand", "spot", "reserved", "flex")
_RESERVATION = re.compile(
    r"(?:projects/(?P<project>[a-z][a-z0-9-]{4,28}[a-z0-9])/)?(?P<name>[a-z]([a-z0-9-]*[a-z0-9])?)"
)
SPOT_GRACE = 15  # seconds that GKE gives a Pod on a Spot VM; a larger terminationGracePeriodSeconds has no effect


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Terms under which machines are asked for."""

    kind: Kind
    reservation: str = ""  # name of the reservation, where the kind is "reserved"
    project: str | None = None  # project of a reservation that is shared; None: the cluster's own

    @property
    def spot(self) -> bool:
        """True if the machines can be taken away at short notice."""
        return self.kind == "spot"

    def node_selector(self) -> dict[str, str]:
        """Return the labels of GKE nodes with such capacity."""
        if self.kind == "spot":
            return {"cloud.google.com/gke-spot": "true"}
        if self.kind == "flex":
            return {"cloud.google.com/gke-queued": "true"}
        if self.kind == "reserved":
            project = {} if self.project is None else {"cloud.google.com/reservation-project": self.project}
            return {"cloud.google.com/reservation-name": self.reservation, **project}
        return {}

    def tolerations(self) -> list[dict[str, str]]:
        """Return what a Pod must tolerate to get such nodes."""
        key = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        return [key] if self.spot else []

    def tpu_api(self, project: str, zone: str) -> dict[str, Any]:
        """Return the fields of a queued resource (UserError: the API has no word for it)."""
        if self.kind == "flex":
            raise UserError("launch.capacity='flex': the Cloud TPU API has no such capacity; use --on gke, or spot")
        if self.kind == "spot":
            return {"spot": {}}
        if self.kind == "reserved":
            owner = self.project or project
            return {"reservationName": f"projects/{owner}/locations/{zone}/reservations/{self.reservation}"}
        return {}


def parse_capacity(text: str, field: str) -> Capacity:
    """Parse `spot`, or `reserved:NAME`, or `reserved:projects/PROJECT/NAME` (UserError: there is no such capacity)."""
    kind, colon, name = text.partition(":")
    found: Kind | None = next((known for known in _KINDS if known == kind), None)
    if found is None:
        raise UserError(
            f"{field}={text!r}: expected on-demand, spot, reserved:NAME or flex{did_you_mean(kind, _KINDS)}"
        )
    if found != "reserved":
        if colon:
            raise UserError(f"{field}={text!r}: {kind} takes no name; expected {kind}")
        return Capacity(found)
    match = _RESERVATION.fullmatch(name)
    if match is None:
        raise UserError(f"{field}={text!r}: expected reserved:NAME or reserved:projects/PROJECT/NAME")
    return Capacity(found, match["name"], match["project"])
