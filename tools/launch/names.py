"""Names of a launched run and of what is made from them: valid as DNS labels, or refused."""

import re

from mesh import UserError

LONGEST = 63  # characters of a DNS label
_RANDOM = 6  # a hyphen and five characters, which Kubernetes adds to the name of a Pod
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
NODE = "node"  # the only replicated job of a JobSet


def run_name(experiment: str) -> str:
    """Return the name of a run from its experiment: `qwq-32b-rl` of `qwq_32b_rl`, `mine` of `path/my.py:mine`."""
    return re.sub(r"[^a-z0-9]+", "-", experiment.rpartition(":")[2].lower()).strip("-")


def check_label(name: str, field: str) -> None:
    """Refuse a name that is no DNS label (UserError)."""
    if _LABEL.fullmatch(name) is None or len(name) > LONGEST:
        expected = f"a letter, then small letters, digits and hyphens, up to {LONGEST} in all, no hyphen at the end"
        raise UserError(f"{field}={name!r}: expected a DNS label: {expected}")


def pod_name(jobset: str, job: int, pod: int) -> str:
    """Return the name under which a Pod is found, also after it was restarted."""
    return f"{jobset}-{NODE}-{job}-{pod}"


def check_pods(name: str, jobset: str, jobs: int, pods: int) -> None:
    """Refuse a run whose longest name of a Pod is no DNS label (UserError); `jobset` is its longest of a JobSet."""
    longest = pod_name(jobset, jobs - 1, pods - 1)
    length = len(longest) + _RANDOM
    if length > LONGEST:
        most = len(name) - (length - LONGEST)
        raise UserError(
            f"launch.name={name!r}: the Pod {longest}-xxxxx would have {length} characters, and a DNS label has at "
            f"most {LONGEST}; expected a name of at most {most}, by --name"
        )
