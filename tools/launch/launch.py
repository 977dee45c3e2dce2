"""The config of a submission: what runs, on which devices, under which terms, and the cluster's names for it."""

import dataclasses
import math
import re
from typing import Any, Literal, NamedTuple

from axlearn_like.config import ConfigBase, Configurable
from tools.launch.kubernetes.names import (
    check_image,
    check_label,
    check_reference,
    check_texts,
    check_value,
    check_variable,
    run_name,
)
from tools.launch.machines.accelerators import Accelerator, Slices, find_slices, is_gpu
from tools.launch.machines.capacity import Capacity, parse_capacity
from tools.launch.machines.storage import Storage, parse_storage

STOCK_IMAGE = "python:3.12"
STATELESS = ("worker", "reference")  # roles that may be taken away as often as it happens
DEVICES = "--tpu KIND:SHAPE or --gpu KIND:NUMBER"
_PREFIXES = {"trainer": "", "worker": "worker_", "reference": "reference_"}  # prefixes of the fields of a role
_SECRET = re.compile(r"(?i)token|secret|passw|credential|api_?key|private_?key")
_PROJECT = re.compile(r"([a-z0-9.-]+:)?[a-z][a-z0-9-]{0,28}[a-z0-9]")
_ZONE = re.compile(r"[a-z]+-[a-z]+[0-9]+-[a-z]")
_NETWORK = re.compile(r"(projects/[a-z0-9.:-]+/global/networks/)?[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_EMAIL = re.compile(r"[a-zA-Z0-9._-]+@[a-z0-9.-]+")
_OPTION = re.compile(r"[\w@%^*+,./:=\[\]-]+", re.ASCII)


class Machines(NamedTuple):
    """Machines of an instance of a role."""

    slices: Slices | None  # slices of the instance; None: one machine without accelerators
    capacity: Capacity  # terms under which they are asked for
    price: float | None  # price of a chip for an hour


class Kubernetes(Configurable):
    """Names and limits of the cluster, with --on gke."""

    class Config(ConfigBase["Kubernetes"]):
        namespace: str = "default"
        service_account: str = "axl-run"  # service account of the Pods; needs the storage and nothing else
        queue: str | None = None  # Kueue's LocalQueue; None: no queue
        priority: str | None = None  # priority class of head, trainer and reference
        worker_priority: str | None = None  # priority class of workers
        max_restarts: int = 100  # limit of restarts of the head's and the trainer's JobSet
        worker_max_restarts: int = 10_000  # limit of restarts of each worker's JobSet, and of the reference's
        host_network: bool | None = None  # use the host's network; None: if several slices are one program
        head_cpus: int = 16
        command_cpus: int = 8  # CPUs of a command without devices
        command_memory: int = 32  # GiB of a command without devices
        placement_policies: dict[str, str] = {}  # "tpu7x:2x2x2" -> name of its workload policy
        # Networks of GPUs of several machines beside the default one, in order; None: Google's examples' names
        gpu_networks: tuple[str, ...] | None = None

        def check_fields(self) -> None:
            """Refuse names that are no DNS labels, and limits below 0."""
            for field in ("namespace", "service_account", "queue", "priority", "worker_priority"):
                if (value := getattr(self, field)) is not None:
                    with self.errors_in(field):
                        check_label(value, field)
            with self.errors_in("placement_policies"):
                for slices, policy in self.placement_policies.items():
                    check_value(policy, slices)
            with self.errors_in("gpu_networks"):
                for network in self.gpu_networks or ():
                    check_label(network, "a network")
            self.require_least(0, "max_restarts", "worker_max_restarts")
            self.require_least(1, "head_cpus", "command_cpus", "command_memory")


class TpuApi(Configurable):
    """Project, network and terms of the Cloud TPU API, with --on queued-resource."""

    class Config(ConfigBase["TpuApi"]):
        project: str | None = None
        zone: str | None = None
        network: str = "default"
        external_addresses: bool = True  # give machines external addresses; False: a NAT reaches image and packages
        service_account: str | None = None  # service account of the machines; None: the project's default
        wait_hours: float | None = None  # a request that has no machines by then fails; None: it waits for ever

        def check_fields(self) -> None:
            """Refuse names that the API does not know, and a wait of no time."""
            for field, rule, example in (
                ("project", _PROJECT, "the id of a project, such as my-project-1"),
                ("zone", _ZONE, "a zone, such as us-east5-a"),
                ("network", _NETWORK, "the name of a network, such as default"),
                ("service_account", _EMAIL, "an address such as runs@my-project-1.iam.gserviceaccount.com"),
            ):
                value = getattr(self, field)
                self.require(field, value is None or rule.fullmatch(value) is not None, example)
            waits = self.wait_hours is None or 0 < self.wait_hours < math.inf
            self.require("wait_hours", waits, "more than 0, or None")


class Slurm(Configurable):
    """Options of the jobs, with --on slurm."""

    class Config(ConfigBase["Slurm"]):
        partition: str | None = None
        account: str | None = None
        time: str | None = None  # limit of a job as sbatch takes it, such as 24:00:00; at its end it is queued again
        gpu_type: str | None = None  # type of the GPUs in --gpus-per-node, such as h100; None: any
        cpus: int | None = None  # CPUs of a machine with GPUs; None: all of it (--exclusive)
        notice: int = 120  # seconds before the limit at which processes are asked to save
        max_restarts: int = 100
        options: tuple[str, ...] = ()  # more options of sbatch, such as "--qos=high"

        def check_fields(self) -> None:
            """Refuse what would be more than one option of a line, and limits below 0."""
            for field in ("partition", "account", "time", "gpu_type", "options"):
                value = getattr(self, field)
                plain = all(_OPTION.fullmatch(one) for one in ([value] if isinstance(value, str) else value or ()))
                self.require(field, plain, "letters, digits and @%^*+,./:=_-[] alone, as lines of #SBATCH take")
            self.require("options", all(one.startswith("--") for one in self.options), "options such as --qos=high")
            self.require_least(1, "cpus", "notice")
            self.require_least(0, "max_restarts")


class Launch(Configurable):
    """One submission: of an experiment, or of any other `axl` command."""

    class Config(ConfigBase["Launch"]):
        experiment: str | None = None  # experiment, as for `axl train` and `axl rl`
        command: tuple[str, ...] = ()  # command instead, such as ("eval", "demo"); relative paths are below `storage`
        applied: tuple[str, ...] = ()  # modifiers, as --apply
        sets: tuple[str, ...] = ()  # edits of the experiment, as --set
        seed: int | None = None
        on: Literal["gke", "queued-resource", "slurm", "local"] = "gke"  # local: JobSets as processes of this machine
        name: str | None = None  # name of the run; None: the experiment's, or the command's first words
        devices: str | None = None  # devices of the trainer: a slice (v5p:4x4x4), GPUs (h100:8); None: only CPUs
        slices: int = 1  # number of the trainer's slices, or groups of machines with GPUs
        capacity: str = "on-demand"  # on-demand, spot, reserved:NAME or flex
        workers: int = 0  # number of rollout workers
        worker_devices: str | None = None  # devices of each worker
        worker_capacity: str | None = None  # capacity of workers; None: the trainer's
        # Devices of the role that scores by trainer.reference; None: the trainer scores
        reference_devices: str | None = None
        reference_capacity: str | None = None  # capacity of the reference; None: the workers'
        price: float | None = None  # price of a trainer chip for an hour, in the user's currency
        worker_price: float | None = None  # price of a worker's chip; None: the trainer's
        reference_price: float | None = None  # price of a reference's chip; None: the workers'
        storage: str = "pvc:axl"  # gs://BUCKET/FOLDER, pvc:CLAIM/FOLDER or dir:PATH (local), which all processes see
        image: str = STOCK_IMAGE
        # Command before each process; None: installs the extra rl, and tpu or cuda where the machine has such devices
        setup: str | None = None
        bundle: bool = True  # send the code in use; False: it is in the image
        port: int = 6379  # port of the head's Ray cluster
        env: dict[str, str] = {}
        secret_env: dict[str, str] = {}  # variable -> "SECRET/KEY" of a Secret in the cluster
        kubernetes: Kubernetes.Config = Kubernetes.Config()
        tpu_api: TpuApi.Config = TpuApi.Config()
        slurm: Slurm.Config = Slurm.Config()

        def check_fields(self) -> None:
            """Refuse devices, capacity, names and secrets that cannot be; nothing is looked up in a cloud."""
            self._check_what_runs()
            self.require_least(1, "slices")
            self.require_least(0, "workers", "price", "worker_price", "reference_price")
            both = (self.workers > 0) == (self.worker_devices is not None)
            self.require("workers", both, "--workers together with --worker-tpu or --worker-gpu")
            for field in ("reference_capacity", "reference_price"):
                fits = getattr(self, field) is None or self.reference_devices is not None
                self.require(field, fits, "None without --reference-tpu KIND:SHAPE or --reference-gpu KIND:NUMBER")
            self.require("bundle", self.bundle or self.image != STOCK_IMAGE, "an image that has the code (image=...)")
            for name in self.env:
                safe = _SECRET.search(name) is None
                self.require("env", safe, f"no secrets ({name}); name a Secret: secret_env={{'{name}': 'SECRET/KEY'}}")
            self._check_texts(self.run_name)
            with self.errors_in("storage"):
                place = self.place()
            folder = self.on in ("local", "slurm")
            fits = (place.kind == "dir:") == folder
            self.require("storage", fits, f"dir:PATH with --on {self.on}" if folder else "gs:// or pvc:")
            if self.on == "slurm":
                here = "none with --on slurm: export the variables where you submit, for a job has them too"
                self.require("secret_env", not self.secret_env, here)
                terms = {self.terms(role).kind for role in _PREFIXES} == {"on-demand"}
                self.require("capacity", terms, "on-demand with --on slurm, where a partition or QOS has its terms")
                gpus = all(one is None or one.gpus for one in map(self.slices_of, _PREFIXES))
                self.require("devices", gpus, "GPUs with --on slurm, such as --gpu h100:8 or --gpu gpu:4")
            self.require("port", 0 < self.port < 1 << 16, "1 to 65535")
            for role, prefix in _PREFIXES.items():
                with self.errors_in(f"{prefix}devices"):
                    self.slices_of(role)
                with self.errors_in(f"{prefix}capacity"):
                    self.terms(role)

        def _check_texts(self, run: str) -> None:
            """Refuse texts that a shell, a container or Kubernetes would not take as they are; `run`: its name."""
            for field in ("env", "secret_env"):
                with self.errors_in(field):
                    for name in getattr(self, field):
                        check_variable(name)
            with self.errors_in("env"):
                check_texts(self.env.values())
            both = sorted(self.env.keys() & self.secret_env.keys())
            self.require("secret_env", not both, f"other variables than in env, not {', '.join(both)}")
            with self.errors_in("secret_env"):
                for name, where in self.secret_env.items():
                    check_reference(where, name)
            with self.errors_in("image"):
                check_image(self.image)
            for field in ("experiment", "command", "applied", "sets", "setup", "storage"):
                value = getattr(self, field)
                with self.errors_in(field):
                    check_texts([value] if isinstance(value, str) else value or ())
            with self.errors_in("name"):
                check_label(run, "--name")

        def _check_what_runs(self) -> None:
            """Refuse both or neither of experiment and command, and fields of the one with the other."""
            both = (self.experiment is None) == bool(self.command)
            self.require("experiment", both, "an experiment, or a command (after --) in its place")
            if self.experiment is not None:
                self.require("devices", self.devices is not None, f"{DEVICES}, the devices of the trainer")
                return
            for field in ("sets", "applied", "seed"):
                empty = getattr(self, field) in ((), None)
                self.require(field, empty, "none with a command, whose own options stand after --")
            self.require("slices", self.slices == 1, "1 with a command, which is one process")
            self.require("workers", self.workers == 0, "0 with a command, which is one process")
            alone = self.reference_devices is None
            self.require("reference_devices", alone, "None with a command, which is one process")

        @property
        def run_name(self) -> str:
            """The name of the run."""
            if self.name is not None:
                return self.name
            if self.experiment is not None:
                return run_name(self.experiment)
            words = [word.rstrip("/").rpartition("/")[2] for word in self.command if not word.startswith("-")]
            return "-".join(run_name(word) for word in words[:2])

        def place(self) -> Storage:
            """Return where the run lives."""
            return parse_storage(self.storage, mounted=self.on != "slurm")

        def slices_of(self, role: str) -> Slices | None:
            """Return the slices of the trainer (or a command), of each worker, or of the reference.

            None: the role has none, or a machine without accelerators.
            """
            prefix = _PREFIXES.get(role, "")
            text, count = getattr(self, f"{prefix}devices"), 1 if prefix else self.slices
            if text is None:
                return None
            numbered = ":" in text and text.rpartition(":")[2].isdecimal()  # a TPU's size is a shape
            field = f"--{prefix.replace('_', '-')}{'gpu' if numbered or is_gpu(text) else 'tpu'}"
            found = find_slices(text, field, count)
            if self.on == "slurm":  # machines of any size without names
                return dataclasses.replace(found, accelerator=Accelerator("", "machine with {chips} GPUs"))
            found.check(field)
            return found

        def terms(self, role: str) -> Capacity:
            """Return the capacity that a role asks for; the head is never on machines that can be taken away.

            A reference, which has no state to lose either, is where the workers are.
            """
            if role == "head":
                return Capacity("on-demand")
            prefix, capacity = self._asked(role, "capacity")
            return parse_capacity(capacity, f"--{prefix.replace('_', '-')}capacity")

        def price_of(self, role: str) -> float | None:
            """Return the price of a chip of a role for an hour."""
            return self._asked(role, "price")[1]

        def _asked(self, role: str, field: str) -> tuple[str, Any]:
            """Return prefix and value of the field of a role, or of those from which it takes it."""
            prefixes = ["", "worker_", "reference_"]
            own = prefixes[prefixes.index(_PREFIXES.get(role, "")) :: -1]
            found = ((prefix, getattr(self, f"{prefix}{field}")) for prefix in own)
            return next(((prefix, value) for prefix, value in found if value is not None), ("", None))

        def machines(self) -> dict[str, Machines]:
            """Return the machines that are asked for, by role: of a command, or of an experiment."""
            asked = {role: Machines(self.slices_of(role), self.terms(role), self.price_of(role)) for role in _PREFIXES}
            if self.experiment is None:
                return {"command": asked["trainer"]}
            computing = {role: one for role, one in asked.items() if one.slices is not None}
            return {"head": Machines(None, self.terms("head"), None), **computing}

    def __init__(self, cfg: Config):
        self.cfg = cfg
