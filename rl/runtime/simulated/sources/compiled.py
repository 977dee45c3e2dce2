"""Durations by the TPU compiler: estimates for an experiment's own programs on the devices of its fleet."""

from axlearn_like.operations.memory import bytes_of_device
from mesh import UserError, make_mesh
from mesh.cost.program import Program
from mesh.cost.roofline import HBM_EFFICIENCY
from mesh.topology import Topology
from rl.fleet.devices import RoleDevices
from rl.fleet.fleet import Placed
from rl.fleet.memory import program_memory
from rl.protocol.experiment import ExperimentConfig
from rl.rollout.config import EngineConfig
from rl.rollout.model_runner.runner import ModelRunner
from rl.runtime.simulated.durations import Durations


def compiled(placed: Placed[ExperimentConfig]) -> Durations:
    """Compile the programs of an update and of drawing, and return what they are estimated to take.

    Rows of the trainer are as long as they can be. A step of decoding is that of a full batch; the part of it that
    reads keys and values grows with the cached tokens. Results are kept on disk by program (`rl.fleet.memory`).

    Raises:
        UserError: a role is on no TPUs, or a program does not fit its devices.
    """
    cfg, fleet, experiment = placed.cfg, placed.fleet, placed.cfg.build()
    training = _RolePrograms("trainer", fleet.trainer, cfg, len(fleet.trainer.described))
    engine = experiment.engine_cfg
    mesh = make_mesh(engine.mesh, fleet.worker.described)
    drawing = _RolePrograms("worker", fleet.worker, cfg, mesh.size)
    decode, prefill = drawing.seconds("decode") / engine.steps_per_dispatch, drawing.program("prefill")
    context = _cached_token_seconds(engine, fleet.worker, mesh.size, drawing.topology)
    rows = training.program("train")
    update = training.seconds("train")
    packed = experiment.trainer_cfg.packing is not None
    return Durations(
        decode_step=max(0.0, decode - context * engine.max_num_seqs * engine.longest),
        decode_context=context,
        prefill_token=drawing.seconds("prefill") / (prefill.rows * prefill.length),
        update=training.seconds("update") if packed else update,
        update_token=update / (rows.rows * rows.length) if packed else 0.0,
    )


class _RolePrograms:
    """The programs of a role on its first `count` devices."""

    def __init__(self, role: str, devices: RoleDevices, cfg: ExperimentConfig, count: int):
        if devices.topology is None:
            form = "--fleet trainer=v5p:2x2x2,workers=4xv5p:2x2x1"
            raise UserError(f"--durations compiled: the {role} is on {devices.text}; expected TPUs, as by {form}")
        self.topology: Topology = devices.topology
        self._role, self._known = role, cfg.programs(devices.compilable()[:count])

    def program(self, name: str) -> Program:
        return self._known[name]()

    def seconds(self, name: str) -> float:
        """Return the estimate for one run (UserError: it does not fit)."""
        found = program_memory(self.program(name), self.topology)
        if found.seconds is None:
            what = f"program {name} of the {self._role} does not fit {self.topology}"
            raise UserError(f"--durations compiled: {what}: {found.refusal}")
        return found.seconds


def _cached_token_seconds(engine: EngineConfig, devices: RoleDevices, count: int, topology: Topology) -> float:
    """Return the seconds in which a device reads what it holds of a cached token."""
    pool = bytes_of_device(ModelRunner(engine, devices.described[:count]).cache.pool)
    generation = topology.generation
    bandwidth = generation.per_device(generation.hbm_bandwidth) * HBM_EFFICIENCY
    return pool / (engine.pool_pages * engine.page_size) / bandwidth
