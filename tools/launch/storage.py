"""Place of a run: a bucket or a volume claim that every process mounts, so that paths are the same in all."""

import dataclasses
import re
from pathlib import PurePosixPath
from typing import Any

from mesh import UserError

MOUNT = "/axl"
_PLACE = re.compile(r"(?P<kind>gs://|pvc:)(?P<name>[a-z0-9][a-z0-9._-]*)(?:/(?P<folder>[\w./-]*))?")
# The metadata of files is not cached: processes see at once what others have written.
_OPTIONS = "implicit-dirs,metadata-cache:ttl-secs:0"


@dataclasses.dataclass(frozen=True)
class Storage:
    """A bucket (`gs://BUCKET/FOLDER`) or a claim (`pvc:CLAIM/FOLDER`) that is mounted at `MOUNT`."""

    kind: str
    name: str
    folder: str

    @property
    def path(self) -> PurePosixPath:
        """The folder, as processes see it."""
        return PurePosixPath(MOUNT) / self.folder

    @property
    def bucket(self) -> bool:
        """True for a bucket of Cloud Storage."""
        return self.kind == "gs://"

    @property
    def url(self) -> str:
        """The folder as it was given."""
        return f"{self.kind}{self.name}{'/' if self.folder else ''}{self.folder}"

    def volume(self) -> dict[str, Any]:
        """Return the volume of a Pod."""
        if not self.bucket:
            return {"name": "runs", "persistentVolumeClaim": {"claimName": self.name}}
        attributes = {"bucketName": self.name, "mountOptions": _OPTIONS}
        return {"name": "runs", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}

    def annotations(self) -> dict[str, str]:
        """Return the annotations of a Pod that mounts it."""
        return {"gke-gcsfuse/volumes": "true"} if self.bucket else {}


def parse_storage(text: str) -> Storage:
    """Parse `gs://BUCKET[/FOLDER]` or `pvc:CLAIM[/FOLDER]` (UserError: it is neither)."""
    found = _PLACE.fullmatch(text)
    folder = "" if found is None else (found["folder"] or "").strip("/")
    if found is None or ".." in folder.split("/"):
        raise UserError(f"launch.storage={text!r}: expected gs://BUCKET[/FOLDER] or pvc:CLAIM[/FOLDER]")
    return Storage(found["kind"], found["name"], folder)
