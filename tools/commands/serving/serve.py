"""`axl serve NAME`: serve the policy of a run over HTTP, in OpenAI's protocol."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mesh.errors import UserError, install_hint
from mesh.imports import collect_rarely, no_blas_threads
from tools.commands import options_as
from tools.experiment import LocalPath, Number, apply_edits, find_policy, text_options, warn_of_idle_accelerator

if TYPE_CHECKING:
    from axlearn_like.layers.wrappers.adapters import Adapter
    from rl.experiment import RLExperiment
    from rl.rollout.model_runner.adapter_bank import AdapterLimits
    from rl.serving.policy import SavedWeights, ServedModel, WarmUp
    from rl.serving.server import Server

KEY_VARIABLE = "AXL_API_KEY"
_NEEDED = ("starlette", "uvicorn", "prometheus_client")
_SERVER = "server."  # edits of the server's config; all others edit the experiment
_ANY = ("0.0.0.0", "::", "")  # all addresses of the machine
LOCAL = ("127.0.0.1", "::1", "localhost")


@dataclasses.dataclass(frozen=True)
class Access:
    """Address of the server, and those who may use it.

    Attributes:
        host: address to listen on.
        port: 0: any free one.
        api_key: what clients must send; None: nothing.
        allowed_hosts: hosts of requests, besides loopback ones, without a key.
        adapters_from: directory from which clients with the key may load adapters.
    """

    host: str
    port: int
    api_key: str | None
    allowed_hosts: tuple[str, ...]
    adapters_from: Path | None

    def check(self) -> None:
        """Refuse an empty key, and adapters of clients without one (UserError)."""
        if self.api_key is not None and not self.api_key.strip():
            raise UserError(f"the API key is empty; leave --api-key out and {KEY_VARIABLE} unset to serve without one")
        if self.adapters_from is not None and self.api_key is None:
            raise UserError(f"--adapters-from: clients load adapters with an API key alone; set {KEY_VARIABLE}")

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of requests that are accepted without a key."""
        return self.allowed_hosts if self.host in _ANY else (*self.allowed_hosts, self.host)


@click.command("serve")
@text_options
@click.argument("name")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any free one.")
@click.option("--api-key", envvar=KEY_VARIABLE, show_envvar=True, help="Clients must send it; better set by variable.")
@click.option(
    "--allow-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="Without an API key: accept this Host and Origin besides loopback ones. May be repeated.",
)
@click.option("--max-queue", type=int, help="Waiting requests beyond which more are refused.")
@click.option("--grace", type=Number(0), help="Seconds for unfinished requests after SIGTERM or Ctrl-C.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a field of the experiment, or of the server (server.max_samples=8). May be repeated.",
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="MODEL=DIR",
    help="Serve a LoRA adapter as another model: a directory of PEFT, or a run of ours. May be repeated.",
)
@click.option(
    "--adapters-from",
    type=LocalPath(path_type=Path, exists=True, file_okay=False),
    help="Let clients with the API key load and unload adapters of this directory.",
)
@click.option(
    "--warmup",
    type=click.Choice(["none", "background", "full"]),
    default="full",
    show_default=True,
    help="Compile all programs before serving, beside it, or each when a request needs it, which waits. They are kept "
    "on disk: a second start is fast.",
)
@click.option("--random-weights", is_flag=True, help="Serve an untrained policy: to try clients, and for load tests.")
@options_as(access=Access)
def command(
    access: Access,
    name: str,
    max_queue: int | None,
    grace: float | None,
    sets: tuple[str, ...],
    adapters: tuple[str, ...],
    warmup: WarmUp,
    random_weights: bool,
) -> None:
    """Serve the policy of NAME: RUN, RUN@best, RUN@STEP, an experiment, or a model.

    A run directory's newest weights are taken; an experiment stands for its run directory in runs/. A model is a
    directory in Hugging Face's form, or one that `axl convert import` made; --set max_prompt_tokens and
    max_new_tokens say how long prompts and answers may be. Requests choose between the policy and its adapters by
    `model`. Ctrl-C or SIGTERM stops the server when all accepted requests are answered.
    """
    collect_rarely()
    no_blas_threads()
    access.check()
    named = _named_adapters(adapters)
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        raise UserError(f"axl serve needs {', '.join(missing)}; {install_hint('serve')}")
    options = {"max_queue": max_queue, "grace": grace}
    server_sets = [edit.removeprefix(_SERVER) for edit in sets if edit.startswith(_SERVER)]
    server_sets += [f"{field}={value}" for field, value in options.items() if value is not None]
    others = tuple(edit for edit in sets if not edit.startswith(_SERVER))

    cfg, weights, model = find_policy(name, others, random_weights=random_weights, command="serve")
    warn_of_idle_accelerator()
    from axlearn_like.run.signals import graceful_stop
    from mesh.programs.compilation import compiling_beside
    from rl.serving.server import listen, url_of

    with listen(access.host, access.port) as listener:
        server, later = _build(cfg, weights, model, server_sets, access, named, warmup)
        stop = click.get_current_context().with_resource(graceful_stop())  # nothing is unfinished before: Ctrl-C ends
        if access.api_key is None and access.host not in LOCAL:
            where = f"{access.host}:{access.port}"
            click.echo(f"axl: warning: any program that reaches {where} may use it; see --api-key", err=True)
        if not stop.requested:
            server.start(listener)
            what = "untrained" if random_weights else "as it came"
            what = what if weights is None else f"weights after {weights.version} updates"
            beside = f" and {len(named)} adapter{'s' if len(named) > 1 else ''}" if named else ""
            click.echo(f"serving {model!r} ({what}){beside} at {url_of(listener)}/v1")
        with compiling_beside(later):
            server.wait(lambda: stop.requested)
        ended_by_itself = not stop.requested
        if stop.requested:
            click.echo(f"stopping: unfinished requests have {server.cfg.grace:g} s (Ctrl-C again: at once)")
        server.stop()
    if server.engine.failure is not None:
        raise server.engine.failure
    if ended_by_itself:
        raise RuntimeError("the web server ended by itself")


def _build(
    cfg: RLExperiment.Config | ServedModel.Config,
    weights: SavedWeights | None,
    model: str,
    server_sets: Sequence[str],
    access: Access,
    named: dict[str, Path],
    warmup: WarmUp,
) -> tuple[Server, list[Callable[[], None]]]:
    """Return the server with an engine that is ready, weights and adapters loaded, and what to compile beside it."""
    from mesh.programs.compilation import enable_compilation_cache
    from rl.serving.adapters import ServedAdapters, check_name
    from rl.serving.policy import make_engine
    from rl.serving.server import Server

    gc.freeze()  # modules stay: no later collection looks through them
    enable_compilation_cache()
    server_cfg = Server.Config()
    apply_edits(server_cfg, server_sets, prefix=_SERVER)
    server_cfg.set(allowed_hosts=(*server_cfg.allowed_hosts, *access.hosts)).check()
    experiment = cfg.build()
    for adapter in named:
        check_name(adapter, model)
    policy = experiment.cfg.policy
    found = {adapter: _read_adapter(path, policy) for adapter, path in named.items()}
    limits = _limits(found, server_cfg, more=access.adapters_from is not None)
    reader, keyed = partial(_read_adapter, model=policy), access.api_key is not None
    served = ServedAdapters(model, reader, access.adapters_from, keyed=keyed)
    engine, later = make_engine(experiment, weights, limits, warmup)
    if engine.runner.kernel_choice:
        click.echo(f"attention by a kernel: {json.dumps(engine.runner.kernel_choice)}")
    for adapter, factors in found.items():
        engine.load_adapter(adapter, factors)
        served.add(adapter, named[adapter].expanduser().absolute())
    server = server_cfg.build(
        engine=engine, tokenizer=experiment.tokenizer, model=model, api_key=access.api_key, adapters=served
    )
    return server, later


def _named_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Return the directories of `--adapter NAME=DIR`, by name."""
    found: dict[str, Path] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UserError(f"--adapter {text}: expected MODEL=DIR, such as french=runs/french")
        if name in found:
            raise UserError(f"--adapter {text}: another adapter has the name {name!r}, {found[name]}")
        found[name] = Path(path)
    return found


def _read_adapter(path: Path, model: Any) -> Adapter:
    from experiments.start.served import read_adapter

    return read_adapter(path, model)


def _limits(found: dict[str, Adapter], cfg: Server.Config, *, more: bool) -> AdapterLimits | None:
    """Return the engine's room for adapters: for those that are named and, if there may be others, for more."""
    from rl.rollout.model_runner.adapter_bank import AdapterLimits

    if not found and not more:
        return None
    if not more:  # memory and time for what is there alone
        matrices = tuple(sorted({path for adapter in found.values() for path in adapter.factors}))
        return AdapterLimits(len(found), max(adapter.rank for adapter in found.values()), matrices)
    rank = max(cfg.max_adapter_rank, *(adapter.rank for adapter in found.values()), 1)
    return AdapterLimits(max(cfg.max_adapters, len(found)), rank)
