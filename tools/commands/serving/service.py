"""`axl service BASE`: train and sample many LoRA adapters of one base for clients of the Tinker API."""

from __future__ import annotations

import dataclasses
import gc
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mesh.errors import UserError, install_hint
from mesh.imports import collect_rarely, no_blas_threads
from tools.commands import options_as
from tools.commands.serving.serve import LOCAL
from tools.experiment import LocalPath, apply_edits, find_policy, text_options, warn_of_idle_accelerator

if TYPE_CHECKING:
    from rl.experiment import RLExperiment
    from rl.serving.policy import SavedWeights, ServedModel
    from rl.serving.service.wire.server import ServiceServer

KEYS_VARIABLE = "AXL_SERVICE_KEYS"
_NEEDED = ("starlette", "uvicorn", "tinker")
_SERVER = "server."  # edits of the server's config; all others edit the experiment
_TENANT = "local"  # owner of a key that is made at the first start
_LINES = """\
    import tinker
    service = tinker.ServiceClient(base_url="{url}", api_key="{key}")
    model = service.create_lora_training_client(base_model="{base}", rank={rank}).result()"""


@dataclasses.dataclass(frozen=True)
class Doors:
    """Address of the service, and the keys of its tenants.

    Attributes:
        host: address to listen on.
        port: 0: any free one.
        keys: `NAME=KEY` each.
        keys_file: file with one of those a line.
    """

    host: str
    port: int
    keys: tuple[str, ...]
    keys_file: Path | None

    def tenants(self, state: Path) -> dict[str, str]:
        """Return {tenant: key}: those that are given or, where only this machine is let in, one kept in `state`."""
        from rl.serving.service.wire.tenants import new_key, read_keys

        found = read_keys(self.keys, self.keys_file)
        if found:
            return found
        if self.host not in LOCAL:
            raise UserError(f"--host {self.host}: other machines need keys; see --key, --keys and {KEYS_VARIABLE}")
        kept = state / "key"
        if not kept.is_file():
            state.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(f"{_TENANT}={new_key()}\n")
        return read_keys((), kept)


@dataclasses.dataclass(frozen=True)
class Room:
    """Room for adapters, and where they are kept.

    Attributes:
        slots: adapters at a time.
        rank: largest rank of one.
        state: directory; None: runs/service and the base's name.
        seed: random seed of a base with random weights; None: the experiment's.
    """

    slots: int
    rank: int
    state: Path | None
    seed: int | None


@click.command("service")
@text_options
@click.argument("base")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="NAME=KEY",
    envvar=KEYS_VARIABLE,
    show_envvar=True,
    help="A tenant and its key, which begins with tml-; better set by variable or --keys. May be repeated. Without "
    "keys, one is made for this machine.",
)
@click.option(
    "--keys", "keys_file", type=LocalPath(exists=True, path_type=Path, dir_okay=False), help="Lines of NAME=KEY."
)
@click.option("--slots", type=click.IntRange(1), default=32, show_default=True, help="Adapters at a time.")
@click.option("--rank", type=click.IntRange(1), default=32, show_default=True, help="Largest rank of an adapter.")
@click.option(
    "--state",
    type=LocalPath(path_type=Path, file_okay=False),
    help="Directory of saved adapters and of accepted requests. Default: runs/service/ and the base's name.",
)
@click.option("--seed", type=int, help="Random seed of a base with random weights.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a field of the experiment, or of the server (server.session_timeout=60). May be repeated.",
)
@click.option("--random-weights", is_flag=True, help="Serve an untrained base: to try clients.")
@options_as(doors=Doors, room=Room)
def command(doors: Doors, room: Room, base: str, sets: tuple[str, ...], random_weights: bool) -> None:
    """Train and sample adapters of BASE for clients of the Tinker API: RUN, RUN@best, an experiment, or a model.

    Programs that use the package tinker run unchanged but for the address and the key. Each tenant has adapters,
    saved weights and samplers of its own. What a service has accepted is on disk: after a crash, start it
    again with the same --state, and clients go on. Ctrl-C or SIGTERM stops it.
    """
    collect_rarely()
    no_blas_threads()
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        raise UserError(f"axl service needs {', '.join(missing)}; {install_hint('service')}")
    others = tuple(edit for edit in sets if not edit.startswith(_SERVER))
    if room.seed is not None:
        others = (*others, f"seed={room.seed}")
    cfg, weights, name = find_policy(base, others, random_weights=random_weights, command="serve")
    state = room.state if room.state is not None else Path("runs") / "service" / name
    keys = doors.tenants(state)
    warn_of_idle_accelerator()
    from axlearn_like.run.signals import graceful_stop
    from rl.serving.server import listen, url_of
    from rl.serving.service.wire.server import ServiceServer

    server_cfg = ServiceServer.Config()
    apply_edits(server_cfg, [edit.removeprefix(_SERVER) for edit in sets if edit.startswith(_SERVER)], prefix=_SERVER)
    server_cfg.check()
    with listen(doors.host, doors.port) as listener:
        server = _build(cfg, weights, name, room, state, server_cfg, keys)
        stop = click.get_current_context().with_resource(graceful_stop())  # nothing is unfinished before: Ctrl-C ends
        if not stop.requested:
            server.start(listener)
            server.service.warm()
            url, shown = url_of(listener), next(iter(keys.values())) if _TENANT in keys else "tml-..."
            click.echo(f"serving {room.slots} adapters of {name!r}, of rank {room.rank} at most, at {url}")
            click.echo(_LINES.format(url=url, key=shown, base=name, rank=min(room.rank, 8)))
        server.wait(lambda: stop.requested)
        ended_by_itself = not stop.requested
        server.stop()
    if ended_by_itself:
        raise RuntimeError(server.service.failure() or "the web server ended by itself")


def _build(
    cfg: RLExperiment.Config | ServedModel.Config,
    weights: SavedWeights | None,
    name: str,
    room: Room,
    state: Path,
    server_cfg: ServiceServer.Config,
    keys: dict[str, str],
) -> ServiceServer:
    """Return the server, with base and adapters ready."""
    from axlearn_like.tokenizers.huggingface import HuggingFaceTokenizer
    from mesh.programs.compilation import enable_compilation_cache
    from rl.serving.service.wire.server import ServiceSettings, make_service

    tenants = server_cfg.limits(keys)
    gc.freeze()  # modules stay: no later collection looks through them
    enable_compilation_cache()
    files = Path(cfg.tokenizer.path) if isinstance(cfg.tokenizer, HuggingFaceTokenizer.Config) else None
    folder = str(files.absolute()) if files is not None and files.is_dir() else None  # clients load it from there
    experiment = cfg.build()
    settings = ServiceSettings(name, state, slots=room.slots, rank=room.rank, tokenizer=folder, limits=tenants)
    service = make_service(experiment, weights, settings)
    limits = (cfg.max_prompt_tokens, cfg.max_new_tokens)
    return server_cfg.build(service=service, keys=keys, tokenizer=experiment.tokenizer, limits=limits)
