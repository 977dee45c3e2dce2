"""`run`: an experiment by name or config, with edits, trained in this process."""

import contextlib
import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from axlearn_like.config import ConfigBase, path_of, to_text
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.jsonl import JsonlTail
from experiments.registry import check_name
from mesh.devices import device_name, one_device_per_core
from mesh.errors import UserError
from mesh.programs.compilation import enable_compilation_cache
from rl.runtime.run import RLRun
from rl.training.warm_start import warm_start_directory
from tools.commands.train import outcome
from tools.experiment import check_command, choose, commands_of, default_run_dir
from tools.fleet import on_fleet
from tools.run.finished import FinishedRun, Row

OnStep = Callable[[Row], object]
Modifier = str | Callable[[ConfigBase], Any]


def run(
    experiment: str | ConfigBase[Any],
    run_dir: str | Path | None = None,
    *,
    sets: Mapping[str, Any] | None = None,
    apply: Sequence[Modifier] = (),
    seed: int | None = None,
    on_step: OnStep | Sequence[OnStep] = (),
    quiet: bool = False,
    force: bool = False,
) -> FinishedRun:
    """Run an experiment in this process, as `axl train` or `axl rl --runtime inprocess` would; return what came of it.

        done = run("demo", sets={"num_steps": 60}, seed=1, on_step=lambda row: print(row["step"], row.get("reward")))

    Called again, it resumes the run in the directory, or says that it has finished and returns at once.

    Args:
        experiment: a registered name, `file.py:function` or `package.module:function`; or a config, which is not
            changed.
        run_dir: where the run lives. None: as on the command line, `runs/NAME`; of a config, a folder in `runs` with
            the config's digest, so that another config is another run.
        sets: fields to change, by path: `{"learner.schedule.peak_lr": 1e-4}`; a text is read as `--set` reads it.
        apply: modifiers, before `sets`: names as of `--apply`, or functions that edit a config in place.
        seed: the experiment's argument `seed`, where it is given by name.
        on_step: called with each row of metrics, in this thread; of several updates, one after another.
        quiet: print nothing.
        force: resume even if the run directory holds another config.

    Returns:
        The run: `.metrics`, `.samples`, `.series("reward")`, `.policy()`, `.compare()`, `.report()`, `.path`. Its
        `finished` is False if Ctrl-C, the interrupt button or SIGTERM ended it after an update; a second Ctrl-C raises
        KeyboardInterrupt at once.

    Raises:
        UserError: the experiment, an edit or the directory does not fit; before anything expensive, as `axl` says it.
    """
    if isinstance(experiment, str):
        check_name(experiment)
    elif seed is not None:
        raise UserError(
            f"seed={seed}: a config has its own; expected the name of an experiment, or sets={{'seed': ...}}"
        )
    named = experiment if isinstance(experiment, str) else path_of(experiment)
    chosen = choose(experiment, sets or {}, seed, apply)
    cfg = chosen.on()
    command = next((one for one in commands_of(cfg) if one in ("rl", "train")), "train")
    check_command(cfg, command, named)
    path = _default_path(experiment, cfg, command) if run_dir is None else Path(run_dir).expanduser()
    watch = _Watch(path, [on_step] if callable(on_step) else list(on_step))
    with contextlib.suppress(RuntimeError):  # an earlier cell has opened the devices
        one_device_per_core()
    enable_compilation_cache()
    say = (lambda line: None) if quiet else functools.partial(print, flush=True)
    if command == "rl":
        cfg = on_fleet(chosen).cfg
        job = RLRun(cfg.clone().build(), say=say)
        finished = job.run(path, runtime="inprocess", force=force, stop=watch.look) is not None
    else:
        cfg = chosen.on(device_name)
        trainer: Any = cfg.clone().build()
        row = trainer.run(path, progress=not quiet, force=force, stop=watch.look)
        finished = bool(row["finished"])
        say(outcome(row, getattr(cfg, "num_steps", 0), path))
    watch.look()
    return FinishedRun(path.resolve(), finished, cfg)


class _Watch:
    """Rows of a run's metrics as they come, for callbacks; it stands in for a request to stop, which it never makes."""

    def __init__(self, path: Path, calls: Sequence[OnStep]):
        run = RunDirectory.attach(path)
        inner = RunDirectory.attach(warm_start_directory(run))
        self._calls = calls
        self._tails = [JsonlTail(one.metrics_path, from_end=one.metrics_path.exists()) for one in (inner, run)]

    def look(self) -> bool:
        for tail in self._tails if self._calls else ():
            for row in tail.new_rows():
                for call in self._calls:
                    call(row)
        return False


def _default_path(experiment: str | ConfigBase[Any], cfg: ConfigBase[Any], command: str) -> Path:
    if isinstance(experiment, str):
        return default_run_dir(experiment, None)
    return Path("runs") / f"{command}-{zlib.crc32(to_text(cfg).encode()):08x}"
