"""What the devices are called in mesh rules."""

import jax


def device_name(devices: list[jax.Device] | None = None) -> str:
    """`<kind>-<count>`, lower case without blanks: "cpu-1", "tpu-v5p-256", "gpu-nvidia-h200-8"."""
    devices = jax.devices() if devices is None else devices
    first = devices[0]
    kind = first.device_kind.lower().replace(" ", "-")
    if not kind.startswith(first.platform):
        kind = f"{first.platform}-{kind}"
    return f"{kind}-{len(devices)}"
