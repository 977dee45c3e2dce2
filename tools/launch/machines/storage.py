"""Place of a run: a bucket, a claim or a folder that every process mounts, so that paths are the same in all."""

import dataclasses
import re
from pathlib import Path, PurePosixPath
from typing import Any

from axlearn_like.run.object_store import local_path
from mesh import UserError
from tools.launch.kubernetes.names import check_claim

MOUNT = "/axl"
FUSE_OPTIONS = "--implicit-dirs --metadata-cache-ttl-secs 0"  # equal to the options of the Pod's volume
_PLACE = re.compile(r"(?P<kind>gs://|pvc:)(?P<name>[a-z0-9][a-z0-9._-]*)(?:/(?P<folder>[\w./-]*))?", re.ASCII)
_PLAIN = re.compile(r"[\w./-]+", re.ASCII)
# The metadata of files is not cached: processes see at once what others have written.
_OPTIONS = "implicit-dirs,metadata-cache:ttl-secs:0"


@dataclasses.dataclass(frozen=True)
class Storage:
    """A bucket (`gs://BUCKET/FOLDER`), a claim (`pvc:CLAIM/FOLDER`) or a folder (`dir:PATH`), mounted at `MOUNT`."""

    kind: str
    name: str
    folder: str
    mount: str = MOUNT

    @property
    def path(self) -> PurePosixPath:
        """The folder, as processes see it."""
        return PurePosixPath(self.mount) / self.folder

    @property
    def bucket(self) -> bool:
        """True for a bucket of Cloud Storage."""
        return self.kind == "gs://"

    @property
    def url(self) -> str:
        """The folder as it was given."""
        return f"{self.kind}{self.name}{'/' if self.folder else ''}{self.folder}"

    @property
    def directory(self) -> Path:
        """The folder of this machine (`dir:PATH`)."""
        return Path(self.name).expanduser().resolve()

    def volume(self) -> dict[str, Any]:
        """Return the volume of a Pod."""
        if self.kind == "dir:":
            return {"name": "runs", "hostPath": {"path": str(self.directory), "type": "DirectoryOrCreate"}}
        if not self.bucket:
            return {"name": "runs", "persistentVolumeClaim": {"claimName": self.name}}
        attributes = {"bucketName": self.name, "mountOptions": _OPTIONS}
        return {"name": "runs", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}

    def annotations(self) -> dict[str, str]:
        """Return the annotations of a Pod that mounts it."""
        return {"gke-gcsfuse/volumes": "true"} if self.bucket else {}


def parse_storage(text: str, mounted: bool = True) -> Storage:
    """Parse `gs://BUCKET[/FOLDER]`, `pvc:CLAIM[/FOLDER]` or `dir:PATH` (UserError: it is none of them).

    `mounted` is False where processes see a folder at its own path, as under Slurm.
    """
    if text.startswith("dir:") and len(text) > 4:
        directory = local_path(text.removeprefix("dir:"), "launch.storage").resolve()
        if ":" in str(directory):
            raise UserError(f"launch.storage={text!r}: expected a path without ':', which ends a path in PYTHONPATH")
        if mounted:
            return Storage("dir:", text.removeprefix("dir:"), "")
        if _PLAIN.fullmatch(str(directory)) is None:
            raise UserError(f"launch.storage={text!r}: expected letters, digits and /._- alone, for lines of #SBATCH")
        return Storage("dir:", str(directory), "", str(directory))
    found = _PLACE.fullmatch(text)
    folder = "" if found is None else (found["folder"] or "").strip("/")
    if found is None or ".." in folder.split("/"):
        raise UserError(f"launch.storage={text!r}: expected gs://BUCKET[/FOLDER], pvc:CLAIM[/FOLDER] or dir:PATH")
    if found["kind"] == "pvc:":
        check_claim(found["name"], "launch.storage")
    return Storage(found["kind"], found["name"], folder)
