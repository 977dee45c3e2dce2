"""What the devices are called in mesh rules."""

import jax

# TPUs report their generation and variant; everybody else, cloud consoles included, says v5p and v5e.
_SOLD_AS = {"tpu-v5": "tpu-v5p", "tpu-v5-lite": "tpu-v5e", "tpu-v6-lite": "tpu-v6e"}


def device_name(devices: list[jax.Device] | None = None) -> str:
    """`<kind>-<count>`, lower case without blanks: "cpu-1", "tpu-v5p-256", "gpu-nvidia-h200-8"."""
    devices = jax.devices() if devices is None else devices
    first = devices[0]
    kind = first.device_kind.lower().replace(" ", "-")
    if not kind.startswith(first.platform):
        kind = f"{first.platform}-{kind}"
    return f"{_SOLD_AS.get(kind, kind)}-{len(devices)}"
