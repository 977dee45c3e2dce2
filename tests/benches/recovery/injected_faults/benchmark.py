"""`axl bench bisect`: one run, and others with one fault each; `axl bisect` must name the fault's event and array.

A fault is in the code of the other run, and so in its replays too, as that of another commit is; or it has passed when
they are made (`passing`), as a flipped bit in memory has.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from axlearn_like.config import to_text
from axlearn_like.learner.schedules import Constant, JoinSchedules
from axlearn_like.run.directory import RunDirectory
from axlearn_like.run.scratch import scratch
from experiments.grpo_bench import grpo_bench
from mesh.programs.compilation import enable_compilation_cache
from rl.experiment import RLExperiment
from rl.protocol.messages import Score
from rl.runtime.inprocess import run_inprocess
from rl.runtime.replay.bisect import Located, Tracer, bisect
from rl.runtime.replay.record import RunRecord
from rl.runtime.replay.update import Replay, replay
from tests.benches.recovery.injected_faults import faults
from tests.benches.recovery.injected_faults.faults import Fault, flipped_ulp
from tools.bench.harness.circumstances import circumstances, machine

UPDATES, FAULTY = 40, 37
_MU = "opt_state/optax/1/0/mu/"
_FLAGS = "--xla_cpu_max_isa=SSE4_2"  # multiplies and adds in two steps: other bits


@dataclasses.dataclass(frozen=True)
class Case:
    """A fault, and where it must be found.

    Attributes:
        event: stage of the update that differs first.
        array: what differs in it, or how its name begins; "": whatever does.
        fault: the fault; None: the run has none but its config or its flags.
        at: update that must be named; None: the faulty one.
        passing: replays are made without the fault.
        edit: changes the config.
        flags: XLA_FLAGS of the run.
        index: element that must be named; None: any.
    """

    event: str
    array: str
    fault: Fault | None = None
    at: int | None = None
    passing: bool = False
    edit: Callable[[RLExperiment.Config], object] | None = None
    flags: str = ""
    index: tuple[int, ...] | None = None


def cases() -> dict[str, Case]:
    """Return the faults by name."""
    token, logprob = (faults.rollout_change(2, one(3)) for one in (faults.other_token, faults.other_logprob))
    right, failed = faults.score_change(1, Score(1.0)), faults.score_change(3, Score(0.0, "error", error="lost"))
    q, down, norm, words = "layers/attention/q_dkqh", "layers/feed_forward/down_fd", "norm/scale", "embedding/weight_vd"
    weights = partial(Case, "weights")
    at = [(1, 5, 0, 1, 3), (0, 17, 2), (7,), (99, 4)]
    ulp = [flipped_ulp(f"params/{name}", index) for name, index in zip((q, down, norm, words), at, strict=True)]
    k = "layers/attention/k_dkh"
    return {
        "an ulp in layer 1's queries": weights(q, ulp[0], index=at[0]),
        "an ulp in layer 0's feed-forward": weights(down, ulp[1], index=at[1]),
        "an ulp in the last norm": weights(norm, ulp[2], index=at[2]),
        "an ulp in the embedding": weights(words, ulp[3], index=at[3]),
        "a flipped exponent": weights(k, flipped_ulp(f"params/{k}", (1, 0, 0, 0), 1 << 23), index=(1, 0, 0, 0)),
        "an ulp in layer 1's queries, passing": weights(q, ulp[0], passing=True),
        "an ulp in the last norm, passing": weights(norm, ulp[2], passing=True),
        "an ulp in a saved array, passing": weights(words, ulp[3], at=UPDATES, passing=True, index=at[3]),
        "a moment of the optimizer": Case("state", _MU + q, flipped_ulp(_MU + q, at[0], 1 << 20), at=FAULTY + 1),
        "a reward": Case("reward", ":1", faults.changed_groups(right)),
        "a reward, passing": Case("reward", "prompt ", faults.changed_groups(right), passing=True),
        "an answer without a verdict": Case("status", ":3", faults.changed_groups(failed)),
        "a token": Case("tokens", ":2", faults.changed_groups(token), index=(3,)),
        "a token, passing": Case("tokens", "prompt ", faults.changed_groups(token), passing=True),
        "an ulp in a log-probability": Case("logprobs", ":2", faults.changed_groups(logprob), index=(3,)),
        "another seed of a prompt": Case("tokens", ":0", faults.other_seed),
        "weights of the version before": Case("tokens", "", faults.stale_weights),
        "a token of a prompt": Case("prompt", "prompt ", faults.other_prompt_token),
        "groups exchanged": Case("lease", "prompts", faults.exchanged_groups, index=(0,)),
        "rows exchanged": Case("batch", "000/advantages", faults.exchanged_rows),
        "an ulp in an advantage": Case("batch", "000/advantages", faults.other_advantages),
        "another rate from an update on": Case("metrics", "lr", edit=_other_rate),
        "another limit of the gradient": Case("metrics", "update_norm", at=1, edit=_other_clip),
        "another XLA flag": Case("", "", at=1, flags=_FLAGS),
    }


QUICK = ("an ulp in layer 1's queries", "a reward", "a token, passing")


def _other_rate(cfg: RLExperiment.Config) -> None:
    rates = (Constant.Config(lr=1e-3), Constant.Config(lr=1.5e-3))
    cfg.learner.schedule = JoinSchedules.Config(parts=rates, boundaries=(FAULTY - 1,))


def _other_clip(cfg: RLExperiment.Config) -> None:
    cfg.learner.clip_norm = 1e-3


def experiment() -> RLExperiment.Config:
    """Return the config of the run without a fault."""
    sizes = {"prompts": 4, "group": 4, "prompt_tokens": 12, "new_tokens": 6, "layers": 2, "dim": 32, "ffn": 64}
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    cfg = grpo_bench(num_steps=UPDATES, **sizes, **heads).set(groups_per_lease=2)
    cfg.trainer.checkpoint.set(save_every=10, keep=9)
    return cfg


def run(say: Callable[[str], None], *, quick: bool = False) -> dict[str, Any]:
    """Inject each fault and locate it; returns `faults`, `located`, seconds, and what was found of each."""
    enable_compilation_cache()
    result: dict[str, Any] = {"bench": "bisect", "machine": machine(), **circumstances(), "interrupted": None}
    found: dict[str, dict[str, Any]] = {}
    began, cpu = time.monotonic(), time.process_time()
    with scratch("bench-bisect") as folder:
        plain = _made(folder / "plain", experiment())
        traces: dict[int, Replay] = {}
        for number, (name, case) in enumerate(cases().items()):
            if quick and name not in QUICK:
                continue
            try:
                found[name] = _located(case, folder / str(number), plain, traces)
            except KeyboardInterrupt:
                result["interrupted"] = name
                break
            say(f"{name}: {'located' if found[name]['located'] else 'NOT LOCATED'}: {found[name]['said']}")
    located = sum(one["located"] for one in found.values())
    seconds = {"seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(time.process_time() - cpu, 1)}
    return result | {"faults": len(found), "located": located, **seconds, "cases": found}


def _made(path: Path, cfg: RLExperiment.Config) -> RunRecord:
    """Run an experiment here."""
    with RunDirectory.open(path, to_text(cfg)) as run:
        run_inprocess(cfg.build(), run, lambda: False, lambda step: None)
    return RunRecord(path)


def _located(case: Case, path: Path, plain: RunRecord, traces: dict[int, Replay]) -> dict[str, Any]:
    cfg = experiment()
    if case.edit is not None:
        case.edit(cfg)
    began = UPDATES if case.at == UPDATES else FAULTY
    faulty: Callable[[], AbstractContextManager[None]]
    faulty = nullcontext if case.fault is None else partial(case.fault, began)
    if case.flags:
        record = _made_elsewhere(path, case.flags)
    else:
        with faulty():
            record = _made(path, cfg)
    replays = [0, 0]

    def trace_plain(update: int, since: int) -> Replay:
        if update not in traces:
            traces[update] = replay(plain, update, since=since, deep=True)
        replays[0] += 1
        return traces[update]

    def trace_other(update: int, since: int) -> Replay:
        replays[1] += 1
        with nullcontext() if case.passing else faulty():
            if case.flags:
                return _elsewhere(record, update, case.flags)
            return replay(record, update, since=since, deep=True)

    tracers: tuple[Tracer, Tracer] = trace_plain, trace_other
    words = cfg.tokenizer.build()
    found = bisect(plain, record, *tracers, lambda tokens: words.decode(list(tokens)))
    if found is None:
        return {"located": False, "said": "nothing differs", "replays": replays}
    shown = {"update": found.update, "event": found.event, "array": found.array, "index": found.index}
    shown |= {"ulps": found.ulps, "layer": found.layer, "said": found.said, "replays": replays}
    return {"located": _is_right(case, found), **shown}


def _is_right(case: Case, found: Located) -> bool:
    """Return True if the update, event, array and element of a fault are those that were found."""
    if case.flags:  # the stage that rounds differently first is the processor's matter
        return found.update == case.at and (found.layer is not None or found.event not in ("tokens", "logprobs"))
    array = case.array in found.array
    index = case.index is None or found.index == case.index
    return (found.update, found.event) == (case.at or FAULTY, case.event) and array and index


def _child(words: list[str], flags: str) -> None:
    command, env = [sys.executable, "-m", "axlearn_like", *words], {**os.environ, "XLA_FLAGS": flags}
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def _made_elsewhere(path: Path, flags: str) -> RunRecord:
    """Run the experiment in a process with other flags."""
    place = f"{__name__}:experiment"
    _child(["rl", place, "--run-dir", str(path), "--runtime", "inprocess", "--quiet"], flags)
    return RunRecord(path)


def _elsewhere(record: RunRecord, update: int, flags: str) -> Replay:
    file = record.path.parent / f"{record.path.name}.npz"
    _child(["replay", str(record.path), "--update", str(update), "--trace", str(file)], flags)
    return Replay.read(file)
