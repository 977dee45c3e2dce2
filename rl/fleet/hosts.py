"""The number of machines that a fleet takes: roles of one host may share it, as the scheduler places them."""

from collections.abc import Iterable

from rl.fleet.devices import RoleDevices

_FULL = 1e-6  # rounding error of summed shares of a chip


def count_hosts(roles: Iterable[tuple[int, RoleDevices]]) -> int:
    """Return the least number of hosts for so many instances of each role, on the largest machines of their kind.

    The hosts of one instance differ, and those of a TPU slice with several hosts have room for nothing else. CPU roles
    take a host for each process, because nothing says how large that is.
    """
    whole, parts = 0, dict[str, list[tuple[float, int]]]()  # kind of device -> (chips of a host, hosts)
    for count, devices in roles:
        each = devices.share * devices.chips / devices.hosts
        if not devices.chips or devices.topology is not None and devices.hosts > devices.topology.slices:
            whole += count * devices.hosts
        else:
            kind = devices.described[0].device_kind
            parts.setdefault(f"{kind} {devices.host_chips}", []).extend([(each, devices.hosts)] * count)
    return whole + sum(_packed(several, float(kind.rpartition(" ")[2])) for kind, several in parts.items())


def _packed(instances: list[tuple[float, int]], room: float) -> int:
    left: list[float] = []
    for each, hosts in sorted(instances, reverse=True):
        fitting = [host for host, free in enumerate(left) if free >= each - _FULL][:hosts]
        for host in fitting:
            left[host] -= each
        left += [room - each] * (hosts - len(fitting))
    return len(left)
