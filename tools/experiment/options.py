"""Arguments that commands on experiments share, and the types of paths among them."""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, override

import click

from axlearn_like.config.consent import allow
from axlearn_like.config.trusted_code import remember
from axlearn_like.run.object_store import local_path
from mesh.errors import UserError, did_you_mean
from mesh.files.bucket import Bucket, bucket_url


class LocalPath(click.Path):
    """A path of this machine; a URL is refused before the command begins (UserError)."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path as `click.Path` does; one whose first folder is `gs:` is absolute, as `./` is lost."""
        text = os.fspath(value)
        local_path(text, param.opts[-1] if param else "path")
        if self.exists and not os.path.lexists(text):
            around = Path(text).parent.iterdir() if Path(text).parent.is_dir() else ()
            self.fail(f"{text!r} does not exist{did_you_mean(Path(text).name, [p.name for p in around])}", param, ctx)
        path = super().convert(value, param, ctx)
        return path.absolute() if isinstance(path, Path) and bucket_url(path) else path


class Number(click.FloatRange):
    """A number within bounds; nan and infinity, which click takes for such, are refused."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number (click's error: it is none, or beyond the bounds)."""
        if not math.isfinite(number := super().convert(value, param, ctx)):
            self.fail(f"{value!r} is no finite number.", param, ctx)
        return number


class AnyPath(LocalPath):
    """A path of this machine, or a URL, which is a Path too (`bucket_url`); refused if nothing serves it."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, or the URL (UserError: its library is not there)."""
        what, url = param.opts[-1] if param else "path", bucket_url(value)
        if url is None:
            return super().convert(value, param, ctx)
        if isinstance(value, str) and "://" not in value:
            raise UserError(f"{what}={value!r}: expected {url} for a bucket, or ./{value} for a folder")
        Bucket(url, what)
        return Path(url)


def edit_options[F: Callable[..., Any]](function: F, *, required: bool = True) -> F:
    """Add the arguments that every command on an experiment's config shares: EXPERIMENT, --apply, --set.

    Args:
        required: EXPERIMENT must be given.
    """
    for decorate in (
        click.option(
            "--set",
            "sets",
            multiple=True,
            metavar="PATH=VALUE",
            help="Change one field, e.g. learner.schedule.peak_lr=3e-4. May be repeated.",
        ),
        click.option(
            "--apply",
            "applied",
            multiple=True,
            metavar="MODIFIER",
            help="Change the config by a function of experiments/modifiers.py (low_rank, int8, ...), or by "
            "FILE.py:FUNCTION, before --set. May be repeated.",
        ),
        click.argument("experiment", required=required),
    ):
        function = decorate(function)
    return function


def experiment_options[F: Callable[..., Any]](function: F) -> F:
    """Add the arguments that `axl train` and `axl rl` share: those of `edit_options`, --seed, --run-dir, --quiet."""
    for decorate in (
        click.option("--quiet", is_flag=True, help="No progress on the terminal."),
        click.option(
            "--run-dir",
            type=AnyPath(path_type=Path),
            help="Where the run lives, a path or gs://BUCKET/PATH; the same command resumes it. Default: "
            "runs/EXPERIMENT.",
        ),
        click.option("--seed", type=int, help="The experiment's argument `seed`."),
        partial(edit_options, required=False),
    ):
        function = decorate(function)
    return function


def text_options[F: Callable[..., Any]](function: F) -> F:
    """Add --code and --allow to a command that reads the config of a run."""
    function = click.option(
        "--allow",
        multiple=True,
        metavar="ITEM",
        callback=lambda _, __, items: allow(items) if items else None,
        expose_value=False,
        help="Something that the run's config reaches outside of the run, as its refusal names it. May be repeated.",
    )(function)
    return click.option(
        "--code",
        multiple=True,
        metavar="PLACE",
        callback=lambda _, __, places: [remember(place) for place in places],
        expose_value=False,
        help="A file (mine.py) or package of yours that the run's config names. Remembered; may be repeated.",
    )(function)


def warn_of_idle_accelerator() -> None:
    """Say that jax computes on the CPU of a machine with a GPU or TPU, if it does.

    Raises:
        UserError: JAX_PLATFORMS names devices for which jax has no plugin.
    """
    from mesh.devices import check_platforms, idle_accelerator

    check_platforms()
    if (reason := idle_accelerator()) is not None:
        click.echo(f"axl: warning: {reason}", err=True)
