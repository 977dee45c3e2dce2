"""Networks of GPUs of several machines on GKE, by which NCCL goes: interfaces of a Pod, a sidecar, libraries, settings.

Sources: the manifests of NCCL's tests in GoogleCloudPlatform/container-engine-accelerators at 992db812 (gpudirect-tcpx,
gpudirect-tcpxo with best-practice.md, gpudirect-rdma), and cloud.google.com/kubernetes-engine/docs/how-to/gpus and
/gpu-bandwidth-gpudirect-tcpx. The cluster needs Google's installer of NCCL's plugin and these networks.

GPUs of one machine need none of it: NVLink connects them, and GKE mounts the driver of its own accord.
"""

import dataclasses
import json
from typing import Any

from tools.launch.launch import Launch
from tools.launch.plan import Role

_DRIVER = "/usr/local/nvidia/lib64"  # GKE's mount of the driver, with Google's NCCL beside it
_NETWORKS = "networking.gke.io/interfaces"
_HOST = "/home/kubernetes/bin"
_WHOLE = 8  # GPUs of a machine with such networks, which a Pod must have all


@dataclasses.dataclass(frozen=True)
class Fabric:
    """One kind of network."""

    networks: tuple[str, ...]  # names in Google's examples
    first: int  # number of the first interface, `eth1` or `eth2`
    volumes: dict[str, tuple[str, str]]  # folders of the machine by name: path there, and in the container or ""
    env: dict[str, str]  # variables of the container
    daemon: tuple[str, str, list[str]] | None = None  # name, image and command of a sidecar; None: there is none
    devices: tuple[str, ...] = ()  # devices of the sidecar beside the GPUs


_IMAGES = "us-docker.pkg.dev/gce-ai-infra"
# NCCL_ALGO and the bindings to cores of the same manifest are of its test, and are left to NCCL.
_TCPX = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_CROSS_NIC": "0",
    "NCCL_PROTO": "Simple",
    "NCCL_NET_GDR_LEVEL": "PIX",
    "NCCL_P2P_PXN_LEVEL": "0",
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
    "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
    "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx",
    "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
    "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_P2P_PCI_CHUNKSIZE": "524288",
    "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
    "NCCL_BUFFSIZE": "4194304",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_NTHREADS": "1",
}
_SYSTEM = {"sys": ("/sys", ""), "proc-sys": ("/proc/sys", "")}
_RXDM = "set -ex; chmod 755 /fts/entrypoint_rxdm_container.sh; exec /fts/entrypoint_rxdm_container.sh --num_hops=2"
_PRESET = ["--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd", "--uds_path", "/run/tcpx"]
_FABRICS = {
    "tcpx": Fabric(
        tuple(f"vpc{number}" for number in range(1, 5)),
        1,
        {"nvidia": (f"{_HOST}/nvidia/lib64", _DRIVER), "tcpx-socket": ("/run/tcpx", "/run/tcpx"), **_SYSTEM},
        _TCPX,
        (
            "tcpx-daemon",
            f"{_IMAGES}/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.12",
            ["/tcpgpudmarxd/build/app/tcpgpudmarxd", *_PRESET, "--setup_param", "--verbose 128 2 0 "],
        ),
    ),
    "tcpxo": Fabric(
        tuple(f"vpc{number}" for number in range(1, 9)),
        1,
        {
            "nvidia": (f"{_HOST}/nvidia/lib64", _DRIVER),
            "aperture-devices": ("/dev/aperture_devices", "/dev/aperture_devices"),
            **_SYSTEM,
        },
        {
            "NCCL_LIB_DIR": _DRIVER,
            "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "/dev/aperture_devices",
            "AXL_NCCL": f"{_DRIVER}/nccl-env-profile.sh",
        },
        (
            "tcpxo-daemon",
            f"{_IMAGES}/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.21",
            ["/bin/sh", "-c", _RXDM],
        ),
        ("/dev/dmabuf_import_helper",),
    ),
    "rdma": Fabric(
        tuple(f"rdma-{number}" for number in range(8)),
        2,
        {"nvidia": (f"{_HOST}/nvidia", "/usr/local/nvidia"), "gib": (f"{_HOST}/gib", "/usr/local/gib")},
        {"AXL_NCCL": "/usr/local/gib/scripts/set_nccl_env.sh"},
    ),
}


def fabric_of(cfg: Launch.Config, role: Role) -> Fabric | None:
    """Return the network between the machines of a role; None: it has one, or parts of some, or no GPUs."""
    slices = role.slices
    if slices is None or role.jobs * role.pods == 1 or slices.host_chips < _WHOLE or cfg.on != "gke":
        return None
    return _FABRICS.get(slices.accelerator.fabric)


def annotations(cfg: Launch.Config, role: Role) -> dict[str, str]:
    """Return the annotations of a Pod: its interfaces, and the devices of the sidecar, which asks for no GPU itself."""
    fabric = fabric_of(cfg, role)
    if fabric is None:
        return {}
    names = fabric.networks if cfg.kubernetes.gpu_networks is None else cfg.kubernetes.gpu_networks
    interfaces = [("eth0", "default"), *((f"eth{fabric.first + n}", name) for n, name in enumerate(names))]
    listed = json.dumps([{"interfaceName": name, "network": network} for name, network in interfaces])
    found = {"networking.gke.io/default-interface": "eth0", _NETWORKS: listed}
    if fabric.daemon is not None:
        devices = [f"/dev/nvidia{n}" for n in range(_WHOLE)]
        devices += ["/dev/nvidiactl", "/dev/nvidia-uvm", *fabric.devices]
        listed = "".join(f"- path: {path}\n" for path in devices)
        found[f"devices.gke.io/container.{fabric.daemon[0]}"] = listed
    return found


def variables(cfg: Launch.Config, role: Role) -> dict[str, str]:
    """Return the variables of a container with GPUs; AXL_NCCL names a script with NCCL's, which is read first."""
    if role.slices is None or not role.slices.gpus or cfg.on == "local":
        return {}
    fabric = fabric_of(cfg, role)
    return {"LD_LIBRARY_PATH": _DRIVER, **({} if fabric is None else fabric.env)}


def volumes(cfg: Launch.Config, role: Role) -> list[dict[str, Any]]:
    """Return the folders of the machine that a Pod mounts."""
    fabric = fabric_of(cfg, role)
    known = {} if fabric is None else fabric.volumes
    return [{"name": name, "hostPath": {"path": path}} for name, (path, _) in known.items()]


def mounts(cfg: Launch.Config, role: Role) -> list[dict[str, str]]:
    """Return where the container has them."""
    fabric = fabric_of(cfg, role)
    known = {} if fabric is None else fabric.volumes
    return [{"name": name, "mountPath": place} for name, (_, place) in known.items() if place]


def sidecars(cfg: Launch.Config, role: Role) -> list[dict[str, Any]]:
    """Return the sidecar that moves what GPUs receive; it ends after the container (GKE 1.29 or later)."""
    fabric = fabric_of(cfg, role)
    if fabric is None or fabric.daemon is None:
        return []
    name, image, command = fabric.daemon
    places = {"nvidia": _DRIVER, "tcpx-socket": "/run/tcpx", "sys": "/hostsysfs", "proc-sys": "/hostprocsysfs"}
    return [
        {
            "name": name,
            "image": image,
            "restartPolicy": "Always",
            "command": command,
            "env": [{"name": "LD_LIBRARY_PATH", "value": _DRIVER}],
            "securityContext": {"capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]}},
            "volumeMounts": [{"name": one, "mountPath": places[one]} for one in fabric.volumes if one in places],
        }
    ]
