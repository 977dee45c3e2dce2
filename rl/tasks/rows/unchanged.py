"""The check that a run resumes with the data that it began with: its plan names rows by their numbers."""

import json
from collections.abc import Mapping
from pathlib import Path

from mesh.errors import UserError
from mesh.files.written import replace_file


def check_unchanged(run: Path, digests: Mapping[str, str], *, force: bool = False) -> None:
    """Record checksums of the tasks' data in a run, or compare (UserError: others; `force`: they are recorded)."""
    path = run / "data.json"
    if path.exists() and not force:
        before = json.loads(path.read_text())
        for name, digest in digests.items():
            if before.get(name, digest) != digest:
                raise UserError(
                    f"the rows of task {name!r} have changed since {run} began: its plan counts them, so it cannot be "
                    "resumed as it was; restore the files, begin another run, or resume with --force"
                )
        if before == dict(digests):
            return
    if digests:
        replace_file(path, json.dumps(digests, indent=2) + "\n")
