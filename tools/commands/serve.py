"""`axl serve NAME`: serve the policy of a run over HTTP, in OpenAI's protocol."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from experiments.registry import check_name
from mesh.errors import UserError, install_hint
from tools.experiment import apply_edits, check_command, code_option, default_run_dir, load_experiment, trust_place

if TYPE_CHECKING:
    from axlearn_like.run.directory import RunDirectory
    from rl.experiment import RLExperiment
    from rl.serving.model import ServedModel
    from rl.serving.policy import Weights
    from rl.serving.server import Server

KEY_VARIABLE = "AXL_API_KEY"
_NEEDED = ("starlette", "uvicorn", "prometheus_client")
_SERVER = "server."  # edits of the server's config; all others edit the experiment
_ANY = ("0.0.0.0", "::", "")  # all addresses of the machine
_LOCAL = ("127.0.0.1", "::1", "localhost")


@click.command("serve")
@code_option
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
@click.option("--grace", type=float, help="Seconds for unfinished requests after SIGTERM or Ctrl-C.")
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="PATH=VALUE",
    help="Change a field of the experiment, or of the server (server.max_samples=8). May be repeated.",
)
@click.option("--random-weights", is_flag=True, help="Serve an untrained policy: to try clients, and for load tests.")
def command(
    name: str,
    host: str,
    port: int,
    api_key: str | None,
    allowed_hosts: tuple[str, ...],
    max_queue: int | None,
    grace: float | None,
    sets: tuple[str, ...],
    random_weights: bool,
) -> None:
    """Serve the policy of NAME: a run directory, a checkpoint in one, an experiment, or a model.

    A run directory's newest weights are taken; an experiment stands for its run directory in runs/. A model is a
    directory in Hugging Face's form, or one that `axl convert import` made; --set max_prompt and max_new say how long
    prompts and answers may be. Ctrl-C or SIGTERM stops the server when all accepted requests are answered.
    """
    if api_key is not None and not api_key.strip():
        raise UserError(f"the API key is empty; leave --api-key out and {KEY_VARIABLE} unset to serve without one")
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        raise UserError(f"axl serve needs {', '.join(missing)}; {install_hint('serve')}")
    options = {"max_queue": max_queue, "grace": grace}
    server_sets = [edit.removeprefix(_SERVER) for edit in sets if edit.startswith(_SERVER)]
    server_sets += [f"{field}={value}" for field, value in options.items() if value is not None]
    sets = tuple(edit for edit in sets if not edit.startswith(_SERVER))

    cfg, weights, model = _resolve(name, sets, random_weights)
    from axlearn_like.run.signals import graceful_stop
    from rl.serving.server import listen, url_of

    with listen(host, port) as listener, graceful_stop() as stop:
        hosts = allowed_hosts if host in _ANY else (*allowed_hosts, host)
        server = _build(cfg, weights, model, server_sets, hosts, api_key)
        if api_key is None and host not in _LOCAL:
            click.echo(f"axl: warning: any program that reaches {host}:{port} may use it; see --api-key", err=True)
        if not stop.requested:
            server.start(listener)
            what = "untrained" if random_weights else "as it came"
            what = what if weights is None else f"weights after {weights.version} updates"
            click.echo(f"serving {model!r} ({what}) at {url_of(listener)}/v1")
        server.wait(lambda: stop.requested)
        ended_by_itself = not stop.requested
        if stop.requested:
            click.echo(f"stopping: unfinished requests have {server.cfg.grace:g} s (Ctrl-C again: at once)")
        server.stop()
    if server.engine.failure is not None:
        raise server.engine.failure
    if ended_by_itself:
        raise RuntimeError("the web server ended by itself")


def _resolve(
    name: str, sets: Sequence[str], random_weights: bool
) -> tuple[RLExperiment.Config | ServedModel.Config, Weights | None, str]:
    """Return the experiment, its weights (None: random ones), and the model's name for clients."""
    path = Path(name)
    if not path.is_dir() and ":" not in name:
        if os.sep in name:
            raise UserError(f"no directory {path}; expected a run directory, a checkpoint in one, or an experiment")
        check_name(name)  # before jax is imported
    if not path.is_dir():
        trust_place(name)
    from axlearn_like.run.directory import RunDirectory
    from rl.serving.policy import find_run, newest_weights

    if path.is_dir():
        from experiments.served import is_model, served_model

        if is_model(path):
            model = served_model(path, random_weights=random_weights)
            apply_edits(model, sets)
            model.check()
            return model, None, path.absolute().name
    run = find_run(path)
    if run is None and path.is_dir():
        raise UserError(
            f"{path} is not a run directory: it has no config.txt; expected one, an experiment's name, or a directory "
            "with config.json and safetensors"
        )
    if run is None and random_weights:
        return _rl_config(load_experiment(name, sets), name), None, default_run_dir(name, None).name
    if run is None:
        run = RunDirectory.attach(default_run_dir(name, None))
        if not run.config_path.is_file():
            raise UserError(
                f"experiment {name!r} has no run in {run.path}; train it (axl rl {name}), name the directory of a run, "
                "or serve it with --random-weights"
            )
    cfg = _recorded(run, sets)
    weights = None if random_weights else newest_weights(run, path)
    if weights is None and not random_weights:
        raise UserError(f"{run.path} holds no weights yet; continue its training, or serve with --random-weights")
    return cfg, weights, run.path.name


def _build(
    cfg: RLExperiment.Config | ServedModel.Config,
    weights: Weights | None,
    model: str,
    server_sets: Sequence[str],
    allowed_hosts: tuple[str, ...],
    api_key: str | None,
) -> Server:
    """Return the server with an engine that is ready: weights loaded, the usual programs compiled."""
    from mesh.compilation import enable_compilation_cache
    from rl.serving.policy import make_engine
    from rl.serving.server import Server

    enable_compilation_cache()
    server_cfg = Server.Config()
    apply_edits(server_cfg, server_sets, prefix=_SERVER)
    server_cfg.set(allowed_hosts=(*server_cfg.allowed_hosts, *allowed_hosts)).check()
    experiment = cfg.build()
    engine = make_engine(experiment, weights)
    return server_cfg.build(engine=engine, tokenizer=experiment.tokenizer, model=model, api_key=api_key)


def _recorded(run: RunDirectory, sets: Sequence[str]) -> RLExperiment.Config:
    """Return the config of a run directory with edits."""
    from rl.serving.policy import recorded_config

    cfg = recorded_config(run)
    apply_edits(cfg, sets)
    return cfg


def _rl_config(cfg: Any, name: str) -> RLExperiment.Config:
    check_command(cfg, "serve", name)
    return cfg
