"""`axl models`: the published models that are built in, and what one of them costs."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any, Literal

import click

from axlearn_like.run.object_store import fetched
from mesh.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from axlearn_like.layers.decoder import Decoder
    from tools.aot.model_card import ModelCard


@click.group("models")
def command() -> None:
    """List the published models that are built in, and show what one costs."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # arithmetic alone: no accelerator is taken


@command.command("list")
@click.argument("words", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _list(words: tuple[str, ...], as_json: bool) -> None:
    """List the models, one to a line, with their sizes: all, or those whose names have one of WORDS in them."""
    from axlearn_like.operations.flops import count_parameters
    from models.catalog import FAMILIES

    rows: dict[str, dict[str, Any]] = {}
    line = "{:<22} {:<20} {:>16} {:>7} {:>7} {:>11}"
    heading = line.format("model", "family", "parameters", "layers", "width", "vocabulary")
    for title, family in FAMILIES.items():
        for name in family.names:
            if words and not any(word.lower() in name.lower() for word in words):
                continue
            if not rows and not as_json:
                click.echo(heading)
            cfg = family(name)
            sizes = {"layers": cfg.num_layers, "dim": cfg.dim, "vocab_size": cfg.vocab_size}
            rows[name] = {"family": title, "parameters": count_parameters(cfg), **sizes}
            if not as_json:  # line by line: to count takes a while
                click.echo(line.format(name, title, *(f"{rows[name][key]:,}" for key in ("parameters", *sizes))))
    if words and not rows:
        known = [name for family in FAMILIES.values() for name in family.names]
        raise UserError(f"no published model has {' or '.join(words)} in its name{did_you_mean(words[0], known)}")
    if as_json:
        click.echo(json.dumps({"models": rows}))


@command.command("show")
@click.argument("name")
@click.option("--length", default=4096, show_default=True, type=click.IntRange(1), help="Tokens of a row.")
@click.option("--topology", "devices_text", help="Devices that hold it, e.g. v5p:4x4x4, h100:8.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def _show(name: str, length: int, devices_text: str | None, as_json: bool) -> None:
    """Show what the model NAME costs: FLOPs and cache of a token, kernels, and with --topology memory of a device.

    NAME is one of `axl models list`, or a directory in Hugging Face's form, or one that `axl convert import` made.
    By arithmetic, without compiling: how it is trained there, and by RL, with rows of so many tokens (`axl recipes`).
    """
    from tools.aot.model_card import model_card

    cfg = _find(name)
    card = model_card(cfg, length)
    found: dict[str, Any] = {"model": name, **dataclasses.asdict(card)}
    if devices_text is not None:
        found |= {"topology": devices_text, **{job: _fit(cfg, job, devices_text, length) for job in ("sft", "rl")}}
    if as_json:
        click.echo(json.dumps(found))
        return
    _print_card(name, cfg, card)
    for job in ("sft", "rl") if devices_text else ():
        click.echo(f"{job} on {devices_text}: {found[job]['said']}")


def _fit(cfg: Decoder.Config, job: Literal["sft", "rl"], devices: str, length: int) -> dict[str, Any]:
    """Return how a model is trained on devices, with eight rows for each, or why it is not; JSON-able."""
    from experiments.recipes.fit import arithmetic, fit
    from experiments.recipes.machines import find_machine

    machine, prompt = find_machine(devices), length // 4
    sizes: dict[str, Any] = {"prompt_tokens": prompt, "answer_tokens": length - prompt, "rows": 8 * machine.count}
    try:
        found = fit(cfg, job, machine, **sizes)
    except UserError as error:
        return {"fits": False, "said": str(error)}
    said = f"{found.method} with mesh {found.mesh}: {found.why}"
    if found.engines is not None:
        said += f"; {found.fleet}: {arithmetic(found.engines.holds)}"
    return {"fits": True, "said": said, "method": found.method, "mesh": found.mesh, "holds": found.holds}


def _find(name: str) -> Decoder.Config:
    """Return the model of a directory, or the published one of that name (UserError: there is none)."""
    from models.catalog import published_model

    folder = fetched(name, "NAME", only=lambda file: file.endswith((".json", ".txt")))
    if not folder.is_dir():
        return published_model(name)
    if (folder / "config.txt").is_file():
        from axlearn_like.config import from_text
        from axlearn_like.layers.decoder import Decoder
        from axlearn_like.run.directory import RunDirectory

        found = from_text(RunDirectory.attach(folder).read_config())
        if not isinstance(found, Decoder.Config):
            raise UserError(f"{name}: expected the directory of a model, got that of a run")
        return found
    from models.huggingface.architectures import read_decoder
    from models.huggingface.config_json import FILE, ConfigJson

    return read_decoder(ConfigJson.load(folder / FILE))[1]


def _print_card(name: str, cfg: Decoder.Config, card: ModelCard) -> None:
    click.echo(f"{name}: {card.parameters:,} parameters, {card.active:,} in use for a token")
    click.echo(f"  {card.layers} layers of width {card.dim:,}, {card.vocab_size:,} tokens, activations {cfg.dtype}")
    click.echo(f"a token in rows of {card.length:,}: {card.forward_flops / 1e9:,.2f} GFLOPs forward,")
    click.echo(f"  {card.training_flops / 1e9:,.2f} in training, {card.decode_flops / 1e9:,.2f} decoded after the row")
    click.echo(f"keys and values of a token: {card.cache_bytes:,} bytes")
    if card.latent_bytes is not None:
        each = card.latent_bytes // card.layers
        click.echo(f"  cached as latents, but by the kernel for TPUs: {card.latent_bytes:,} bytes, {each:,} in a layer")
    for platform, kernel in card.kernels.items():
        click.echo(f"attention of packed rows on {platform}: {kernel}")
        click.echo(f"  to the paged cache: {card.decode_kernels[platform]}")
