"""Names of the processes of a run."""

from mesh.distributed import process_name
from rl.experiment import RLExperiment
from rl.training.scoring.reference_role import ROLE as REFERENCE

__all__ = ["REFERENCE", "process_groups", "server_names", "spare_names"]


def server_names(cfg: RLExperiment.Config) -> list[str]:
    """Return the names of the parameter server's actors, the one with the directory first."""
    return ["parameter-server", *(f"parameter-server-{n}" for n in range(1, cfg.parameter_server.shard_servers))]


def process_groups(cfg: RLExperiment.Config) -> dict[str, list[list[str]]]:
    """Return the names of the actors that compute: role -> its instances -> their processes, the leader first."""

    def group(name: str, hosts: int) -> list[str]:
        return [process_name(name, index) for index in range(hosts)]

    workers = [group(f"worker-{worker}", cfg.fleet.worker_hosts) for worker in range(cfg.workers)]
    # There is none without devices of its own.
    reference = [group(REFERENCE, cfg.fleet.reference_hosts)] if cfg.fleet.reference_hosts else []
    return {"trainer": [group("trainer", cfg.trainer.processes)], "worker": workers, REFERENCE: reference}


def spare_names(cfg: RLExperiment.Config) -> dict[str, list[str]]:
    """Return the names of the warm processes that take over from dead ones, by role (`standby`)."""
    return {role: [f"{role}-spare-{n}" for n in range(cfg.standby.get(role, 0))] for role in ("trainer", "worker")}
