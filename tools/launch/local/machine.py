"""Variables of the machines of a role, where devices of this machine's CPU stand in for chips and GPUs."""

from mesh import UserError
from tools.launch.plan import LaunchPlan, Role
from tools.launch.process.ray_cluster import GPU_MODEL

_MOST = 16  # processes that a laptop can have
_RAY_NAMES = {"tpu7x": "v7x"}


def machine_variables(role: Role) -> dict[str, str]:
    """Return the variables of a role's machines; GKE and Cloud TPU set the same names."""
    if role.slices is None:
        return {"JAX_PLATFORMS": "cpu"}
    cpus = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(role.slices.devices.each_host)}
    if role.slices.gpus:
        return {**cpus, GPU_MODEL: role.slices.devices.model or ""}
    topology = role.slices.topology
    kind = role.slices.accelerator.api or _RAY_NAMES.get(topology.generation.name, topology.generation.name)
    return {
        **cpus,
        "TPU_ACCELERATOR_TYPE": f"{kind}-{role.slices.chips * topology.generation.counted}",
        "TPU_TOPOLOGY": role.slices.shape,
    }


def check_size(plan: LaunchPlan) -> None:
    """Refuse a run with more processes than this machine should start (UserError)."""
    count = sum(role.count * role.jobs * role.pods for role in plan.roles)
    if count > _MOST:
        raise UserError(
            f"--on local: {plan.name} would start {count} processes on this machine, and at most {_MOST} are "
            "sensible; use smaller slices or fewer workers here, and --dry-run DIR to see the manifests of this run"
        )


def variables_of(plan: LaunchPlan) -> dict[str, dict[str, str]]:
    """Return the variables of the machines of each role."""
    return {role.name: machine_variables(role) for role in plan.roles}
