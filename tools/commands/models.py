"""`axl models`: the published models that are built in, and what one of them costs."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import click

from axlearn_like.run.object_store import fetched
from mesh.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from axlearn_like.layers.decoder import Decoder
    from tools.aot.model_card import DeviceMemory, ModelCard

_GIB = 1 << 30


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
            cfg = family.make(name)
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
    By arithmetic, without compiling: what a program needs beside these arrays, `axl aot` asks the compiler.
    """
    from rl.fleet.devices import parse_devices
    from tools.aot.model_card import cached_tokens, model_card, rollout_memory, training_memory

    cfg = _find(name)
    devices = None if devices_text is None else parse_devices(devices_text, "--topology")
    card = model_card(cfg, length)
    found: dict[str, Any] = {"model": name, **dataclasses.asdict(card)}
    if devices is not None:
        training, rollout = training_memory(cfg, card, devices), rollout_memory(cfg, card, devices)
        tokens = cached_tokens(card, rollout, devices)
        found["topology"] = devices.text
        found["training"] = {**dataclasses.asdict(training), "left": training.left, "fits": training.left > 0}
        found["rollout"] = {**dataclasses.asdict(rollout), "left": rollout.left, "fits": tokens > 0, "tokens": tokens}
    if as_json:
        click.echo(json.dumps(found))
        return
    _print_card(name, cfg, card)
    if devices is not None:
        click.echo(f"training on {devices.text} by fsdp, a row of {length:,} tokens a device: {_memory(training)}")
        click.echo(f"rollout on a host of {devices.text}, {rollout.devices} devices an engine: {_memory(rollout)}")
        click.echo(f"  room for the keys and values of {tokens:,} tokens, {tokens // length:,} sequences of {length:,}")


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


def _memory(memory: DeviceMemory) -> str:
    parts = " + ".join(f"{what} {size / _GIB:.2f}" for what, size in memory.holds.items())
    verdict = "fits" if memory.left > 0 else "does not fit"
    return f"{parts} of {memory.hbm / _GIB:.2f} GiB of a device: {verdict}"
