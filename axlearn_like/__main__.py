"""The entry of the command line `axl`: refuses to start where other folders hide this project's packages."""

import atexit
import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("mesh", "models", "rl", "experiments", "tools")


def main() -> int:
    """Run the command line, unless a folder on the import path hides a package of this project.

    Returns:
        The exit status; 2 with a message where a package is hidden.
    """
    ours = Path(__file__).resolve().parent.parent
    for name in _PACKAGES:
        spec = find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is None or found.parent != ours / name:
            place = (
                "is missing" if found is None else f"is hidden by {found.parent if found.stem == '__init__' else found}"
            )
            print(
                f"axl: error: this project's package {name!r}, expected in {ours / name}, {place}; rename that folder, "
                "or start axl from elsewhere (and without it on PYTHONPATH)",
                file=sys.stderr,
            )
            return 2
    atexit.register(gc.freeze)  # the interpreter's last collections would look through all modules: a third of a second
    return import_module("tools.cli").main()


if __name__ == "__main__":
    sys.exit(main())
