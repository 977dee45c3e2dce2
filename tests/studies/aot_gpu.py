"""Memory of an engine's decoding on an H100 that is not there, from the pages and on windows, by XLA's own compiler.

    python -m tests.studies.aot_gpu --model Qwen3-8B

Needs jax's plugin for CUDA (the extra `cuda`), no GPU: jax gives it a description of the device. Kernels are chosen
without trying them out, and cuDNN is not asked; nothing runs, so no speed follows.
"""

import os
import platform
import time
from collections.abc import Iterator
from typing import Any

import click

_POSITIVE = click.IntRange(min=1)
# Figures of an H100 SXM by NVIDIA's data sheet and the CUDA runtime, in the fields of XLA's GpuTargetConfigProto.
_DEVICE: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "device_vendor": "NVIDIA Corporation",
    "platform_version": "Compute Capability 9.0a",
    "device_memory_size": 84_942_979_072,
    "memory_bandwidth": 3_352_320_000_000,
    "l2_cache_size": 52_428_800,
    "clock_rate_ghz": 1.98,
    "core_count": 132,
    "fpus_per_core": 128,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "threads_per_warp": 32,
    "registers_per_core_limit": 65_536,
    "registers_per_block_limit": 65_536,
    "shared_memory_per_block": 49_152,
    "shared_memory_per_block_optin": 232_448,
    "shared_memory_per_core": 233_472,
    "block_dim_limit_x": 2_147_483_647,
    "block_dim_limit_y": 65_535,
    "block_dim_limit_z": 65_535,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "device_address_bits": 64,
    "driver_version": "13.0.0",
    "runtime_version": "12.8.0",
    "compile_time_toolkit_version": "12.8.0",
    "dnn_version": "9.10.0",
}
_CAPABILITY = "cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }"
_VERSIONS = "dnn_version_info { major: 9 minor: 10 patch: 0 }"


def h100s(count: int) -> list[Any]:
    """Return described H100s of one host."""
    from jax.experimental.topologies import get_topology_desc

    fields = " ".join(f"{name}: {_text(value)}" for name, value in _DEVICE.items())
    config = f'gpu_device_info {{ {fields} {_CAPABILITY} }} platform_name: "CUDA" {_VERSIONS} '
    config += f"device_description_str: {_text(_DEVICE['name'])}"
    try:
        described = get_topology_desc("h100", "cuda", target_config=config, topology=f"1x1x{count}")
    except NotImplementedError as error:  # no plugin, or one that describes no devices: jax says which
        message = f"jax cannot describe a GPU here ({error}); expected the extra cuda to be installed"
        raise click.ClickException(message) from error
    return list(described.devices)


def _text(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@click.command()
@click.option("--model", default="Qwen3-8B", show_default=True, help="A name of `axl models list`.")
@click.option("--layers", type=_POSITIVE, help="Layers of the model; the default is all.")
@click.option("--max-prompt-tokens", default=1024, show_default=True, type=_POSITIVE)
@click.option("--max-new-tokens", default=3072, show_default=True, type=_POSITIVE)
@click.option("--max-num-seqs", default=64, show_default=True, type=_POSITIVE)
@click.option("--devices", default=1, show_default=True, type=_POSITIVE, help="H100s, over which heads are divided.")
@click.option("--cascade", type=click.IntRange(min=2), help="Rows that read the keys they share once.")
@click.option("--int8", is_flag=True, help="Round keys and values to eight bits.")
@click.option(
    "--decode-from", type=click.Choice(["pages", "windows"]), default=("pages",), show_default=True, multiple=True
)
def main(
    model: str,
    layers: int | None,
    max_prompt_tokens: int,
    max_new_tokens: int,
    max_num_seqs: int,
    devices: int,
    cascade: int | None,
    int8: bool,
    decode_from: tuple[str, ...],
) -> None:
    """Print, as Markdown, what the largest dispatch of decoding holds on each device."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from models.catalog import published_model
    from rl.rollout.engine import RolloutEngine

    policy: Any = published_model(model)
    cfg = RolloutEngine.Config(
        model=policy.set(num_layers=layers or policy.num_layers),
        stop_tokens=(0,),
        max_prompt_tokens=max_prompt_tokens,
        max_new_tokens=max_new_tokens,
        max_num_seqs=max_num_seqs,
        mesh={"tensor": devices},
        cascade=cascade,
        kv_cache_dtype="int8" if int8 else None,
    )
    described = h100s(devices)  # refused before anything is printed
    print(f"{model}, {layers or policy.num_layers} layers; jax {jax.__version__}, Python {platform.python_version()}\n")
    print(
        "| decoding from | arguments, GiB | of these pages | windows | updated in place | temporary | compiled in, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for one in decode_from:
        print(f"| {one} | {' | '.join(_row(cfg.clone(decode_from=one), described))} |", flush=True)


def _row(cfg: Any, devices: list[Any]) -> Iterator[str]:
    import jax

    from axlearn_like.operations.memory import bytes_of_device
    from rl.rollout.model_runner.dispatches import largest_dispatches
    from rl.rollout.model_runner.runner import ModelRunner

    runner = ModelRunner(cfg, devices)
    decode = next(one for one in largest_dispatches(runner) if one.kind == "decode")
    with jax.set_mesh(runner.mesh):
        windows, traced = runner.cache.windows(decode.rows), decode.trace()
        began = time.perf_counter()
        memory: Any = traced.lower().compile().memory_analysis()
    sizes = memory.argument_size_in_bytes, bytes_of_device(runner.cache.pool), bytes_of_device(windows)
    for size in (*sizes, memory.alias_size_in_bytes, memory.temp_size_in_bytes):
        yield f"{size / (1 << 30):.2f}"
    yield f"{time.perf_counter() - began:.0f}"


if __name__ == "__main__":
    main()
