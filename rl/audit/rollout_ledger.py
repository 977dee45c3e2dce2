"""The ledger of a run: the names of all rollouts that its updates have consumed, with digests, some 24 bytes each.

A rollout follows from its name and the weights of its version, so nothing else has to be kept of it: what was in flight
when all roles were lost is drawn again.
"""

import base64
import hashlib
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from axlearn_like.run.events import EventLog
from axlearn_like.run.metrics import read_rows
from mesh import UserError
from rl.protocol.messages import Group, Rollout, Score

GROUP = struct.Struct("<QIH")  # id of the prompt, how often it was drawn before, rollouts
ROLLOUT = struct.Struct("<iQIf")  # version, digest of the tokens, digest of the log-probabilities, reward


class RolloutName(NamedTuple):
    """All that a rollout of a run follows from; `draw`: how often its prompt was drawn before (`Prompt.draw`)."""

    version: int
    prompt: int
    sample: int
    draw: int = 0

    def __str__(self) -> str:
        draw = f" (draw {self.draw})" if self.draw else ""
        return f"version {self.version}, prompt {self.prompt}{draw}, sample {self.sample}"


class Entry(NamedTuple):
    """A rollout of the ledger."""

    name: RolloutName
    tokens: int  # 64 bits of a digest of its tokens, which of them are actions, and its end
    logprobs: int  # 32 bits of a digest of its log-probabilities' bits
    reward: float  # float32; -inf where the verifier could not give one

    def difference(self, other: "Entry") -> str | None:
        """Return what differs in another entry of the same place; None: nothing."""
        fields = zip(("rollout", "tokens", "log-probabilities", "reward"), self, other, strict=True)
        return next((what for what, one, two in fields if one != two), None)


class LedgerRow(NamedTuple):
    """The rollouts of an update, packed, and the classes of hardware that drew them."""

    data: bytes
    hardware: tuple[str, ...]


class RolloutLedger:
    """Appender to `ledger.jsonl` of a run directory."""

    def __init__(self, folder: Path):
        """`folder`: the run directory."""
        self._log = EventLog(ledger_path(folder))

    def observe(self, step: int, groups: Sequence[Group]) -> None:
        """Append the rollouts that update `step` is made of."""
        data = base64.b64encode(pack(groups)).decode()
        hardware = sorted({group.hardware for group in groups})
        self._log.append("controller", "rollouts", step=step, data=data, hardware=hardware)


def ledger_path(folder: Path) -> Path:
    """Return the file of a run directory's ledger."""
    return folder / "ledger.jsonl"


def entry(rollout: Rollout, score: Score, draw: int) -> Entry:
    """Return the entry of a rollout; of several versions it names the last one."""
    whole = rollout.tokens.astype("<i4", copy=False).tobytes() + np.packbits(rollout.action_mask).tobytes()
    tokens = hashlib.blake2b(whole + rollout.finish_reason.encode(), digest_size=8).digest()
    logprobs = hashlib.blake2b(rollout.logprobs.astype("<f4", copy=False).tobytes(), digest_size=4).digest()
    version = int(rollout.versions[-1]) if len(rollout.versions) else -1
    reward = float(np.float32(score.reward)) if score.status == "ok" else float("-inf")
    name = RolloutName(version, rollout.prompt_id, rollout.sample_id, draw)
    return Entry(name, int.from_bytes(tokens, "little"), int.from_bytes(logprobs, "little"), reward)


def pack(groups: Iterable[Group]) -> bytes:
    """Return the entries of whole groups, whose samples are numbered from 0; nodes of their plans are left out."""
    parts: list[bytes] = []
    for group in groups:
        pairs = [pair for pair in zip(group.rollouts, group.scores, strict=True) if pair[0].node is None]
        parts.append(GROUP.pack(group.prompt.id, group.prompt.draw, len(pairs)))
        for rollout, score in pairs:
            one = entry(rollout, score, group.prompt.draw)
            parts.append(ROLLOUT.pack(one.name.version, one.tokens, one.logprobs, one.reward))
    return b"".join(parts)


def unpack(data: bytes) -> list[Entry]:
    """Return what `pack` has packed (ValueError: it is something else)."""
    found: list[Entry] = []
    at = 0
    try:
        while at < len(data):
            prompt, draw, count = GROUP.unpack_from(data, at)
            at += GROUP.size
            for sample in range(count):
                version, *digests = ROLLOUT.unpack_from(data, at)
                found.append(Entry(RolloutName(version, prompt, sample, draw), *digests))
                at += ROLLOUT.size
    except struct.error:
        raise ValueError(f"a row of a ledger ends after {len(data)} bytes, within a rollout") from None
    return found


def read_ledger(folder: Path) -> dict[int, LedgerRow]:
    """Return a run's ledger by update, from 1 (UserError: one is missing, or was made twice of other rollouts)."""
    found: dict[int, LedgerRow] = {}
    for row in read_rows(ledger_path(folder)):
        step, made = _row(row, folder)
        if step in found and found[step].data != made.data:
            raise UserError(
                f"{folder}: update {step} was made twice, of other rollouts each time: nobody can repeat it"
            )
        found[step] = made
    if missing := sorted(set(range(1, max(found, default=0) + 1)) - found.keys()):
        raise UserError(f"{folder}: {ledger_path(folder).name} lacks update {missing[0]}")
    return dict(sorted(found.items()))


def _row(row: dict[str, Any], folder: Path) -> tuple[int, LedgerRow]:
    try:
        return int(row["step"]), LedgerRow(
            base64.b64decode(row["data"], validate=True), tuple(map(str, row["hardware"]))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{ledger_path(folder)}: no row of a ledger ({error!r})") from None
