"""The checks of `axl doctor`: which there are, what each returns, in which process and how long each may run."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mesh.errors import UserError, did_you_mean


class Finding(NamedTuple):
    """The result of one check: what was found, and what to do about it; figures are for `--json`."""

    status: Literal["ok", "warn", "fail", "skip"]
    value: str
    do: str = ""
    figures: Mapping[str, Any] = {}
    seconds: float = 0.0


class Check(NamedTuple):
    """A function `module:name` of the options, the kind of process that runs it, its deadline; --quick includes it."""

    place: str
    process: str  # host (without jax), device, ray
    seconds: float
    quick: bool


def _checks(module: str, names: str, process: str = "device", seconds: float = 90, *, quick: bool = False) -> Any:
    return {name: Check(f"tools.bench.doctor.{module}:{name}", process, seconds, quick) for name in names.split()}


CHECKS: dict[str, Check] = {
    **_checks("host", "versions host_memory shared_memory open_files clock disk bucket", "host", 60, quick=True),
    **_checks("devices", "devices topology device_memory cache", quick=True),
    **_checks("speed", "bandwidth matrix"),
    **_checks("kernels", "attention paged_decode grouped_products policy_head numerics"),
    **_checks("steps", "sft_step rl_step", seconds=200),
    **_checks("host", "ray", "ray"),
}


def choose_checks(only: list[str], *, quick: bool, bucket: bool) -> dict[str, Check]:
    """Return the checks that were asked for, and `devices` before those that need it (UserError: an unknown name)."""
    for name in only:
        if name not in CHECKS:
            raise UserError(f"--only {name}: there is no such check{did_you_mean(name, CHECKS, limit=len(CHECKS))}")
    if "bucket" in only and not bucket:
        raise UserError("--only bucket: expected --bucket gs://NAME/FOLDER beside it")
    names = set(only) or {name for name, check in CHECKS.items() if check.quick or not quick}
    names |= {"devices"} if any(CHECKS[name].process == "device" for name in names) else set()
    return {name: check for name, check in CHECKS.items() if name in names and (bucket or name != "bucket")}
