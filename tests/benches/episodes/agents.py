"""Prompts of several agents about one long text: computed each time, shared where they begin alike, and by KVCOMM.

A small policy is fine-tuned on lookups in texts (`experiments/tasks/agents.py`), in two stages: short texts, then long
ones. The roles then answer problems that it has not seen, one request at a time. All ways answer the same prompts, in
which peers have said what the policy said in prompts that were computed.
"""

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from flax import nnx

from axlearn_like.checkpoint.convert import StartFrom
from axlearn_like.layers.base import Params, split
from axlearn_like.tokenizers.protocol import Tokenizer
from axlearn_like.training.trainer import Trainer
from experiments.tasks.agents import TOKENIZER, Lookup, lookup, lookup_roles, lookup_seed, lookup_sft, role_prompt
from models.tiny import tiny
from rl.protocol.messages import Prompt
from rl.protocol.segments import SegmentedText
from rl.rollout.decoding.scores import TokenScores
from rl.rollout.engine import RolloutEngine
from rl.rollout.kv_cache.kvcomm.anchors import KVComm
from rl.rollout.request import Request, StopConditions
from rl.tasks.encoding import encode_segments
from tests.benches.episodes.policies import greedy_engine, trained_params

_UNSEEN = 3_000_000  # number of the first problem, behind those of training


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes.

    Attributes:
        words: tokens of a text.
        short, long: steps of fine-tuning on short texts, and on texts of `words`.
        problems: problems that all roles answer.
        dim, layers: dim and layers of another policy, with random weights, for seconds alone.
        kvcomm: the fields of KVCOMM that are not its defaults.
    """

    words: int = 1536
    short: int = 700
    long: int = 30
    problems: int = 16
    dim: int = 384
    layers: int = 4
    kvcomm: KVComm.Config = dataclasses.field(default_factory=lambda: KVComm.Config(anchors=8))


@dataclasses.dataclass(frozen=True)
class _Answer:
    """The answer to one prompt."""

    seconds: float  # seconds to its first token, which is all of it
    right: bool
    scores: TokenScores
    reused: bool  # True if it was written from bases and anchors
    computed: int  # tokens of the prompt that were computed in their context
    bases: int  # tokens that were computed alone
    tokens: int  # tokens of the prompt


def agents(quick: bool) -> dict[str, Any]:
    """Return the figures of each way for texts that are records of one form, and for texts of free order."""
    job = Job(words=192, short=60, long=4, problems=4, dim=64, layers=2) if quick else Job()
    cfg, params, seconds = _trained(job)
    records = _compared(job, cfg, params, record=True)
    best, rotated = records["kvcomm"], records["rotation"]
    return {
        "reuse": best["reuse"],
        **_speed(job),
        "ttft_ratio_of_trained": best["ttft_ratio"],
        "accuracy_over_dense": best["accuracy"] - records["dense"]["accuracy"],
        "kl_to_dense": best["kl_of_reused"],
        "kl_of_rotation": rotated["kl"],
        "exact_reuse": records["exact"]["reuse"],
        "training_seconds": seconds,
        "job": {"words": job.words, "problems": job.problems, "roles": len(lookup_roles())},
        "records": records,
        "free_texts": _compared(job, cfg, params, record=False),
    }


def _compared(job: Job, cfg: Trainer.Config, params: Params, *, record: bool) -> dict[str, dict[str, Any]]:
    """Return the figures of all ways; `record`: texts are records of one form."""
    tokenizer = TOKENIZER.build()
    dense = _answers(job, _engine(job, cfg, params, tokenizer), params, record=record)
    said = [[_said(tokenizer, one) for one in roles] for roles in dense]
    ways: dict[str, dict[str, Any]] = {
        "rotation": {"kvcomm": job.kvcomm.clone(offsets=False)},
        "kvcomm": {"kvcomm": job.kvcomm},
        "exact": {"enable_prefix_caching": True},
    }
    found = {"dense": dense}
    for way, fields in ways.items():
        engine, order = (
            _engine(job, cfg, params, tokenizer, **fields),
            "shared_first" if way == "exact" else "role_first",
        )
        found[way] = _answers(job, engine, params, said, order, record=record)
    figures = {way: _figures(one, dense) for way, one in found.items()}
    del figures["exact"]["kl"]  # its prompts have another order; what is computed once is exact
    return figures


def _trained(job: Job) -> tuple[Trainer.Config, Params, float]:
    """Return the config and the parameters of a policy that was fine-tuned in two stages, and the seconds it took."""
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        first = lookup_sft(steps=job.short)
        first.build().run(f"{folder}/short")
        cfg = lookup_sft(steps=job.long, words=job.words).set(start_from=StartFrom.Config(path=f"{folder}/short"))
        cfg.input.batch_size = 4
        cfg.learner.schedule.set(peak_lr=2e-3, end_lr=7e-4, warmup_steps=min(10, job.long - 1))
        params = trained_params(cfg, Path(folder) / "long")
    return cfg, params, time.perf_counter() - began


def _speed(job: Job) -> dict[str, Any]:
    """Return how much sooner a larger policy of random weights draws a first token, where all is reused that can be."""
    policy = tiny(vocab_size=TOKENIZER.vocab_size, dim=job.dim, num_layers=job.layers, num_heads=6, num_kv_heads=2)
    cfg = lookup_sft().set(model=policy)
    params, few = split(policy.build(rngs=nnx.Rngs(0)))[1], dataclasses.replace(job, problems=4)
    eager = job.kvcomm.clone(entropy=1.0, anchors=4)
    tokenizer = TOKENIZER.build()
    dense, found = (
        _answers(few, _engine(job, cfg, params, tokenizer, **fields), params, [["=0", "=0"]] * few.problems)
        for fields in ({}, {"kvcomm": eager})
    )
    figures = _figures(found, dense)
    names = {"ttft_ratio": "ttft_ratio", "ttft_ratio_with_bases": "ttft_ratio_of_reused"}
    return {name: figures[known] for name, known in names.items()} | {
        "ttft_seconds_dense": _figures(dense, dense)["ttft_seconds"]
    }


def _engine(job: Job, cfg: Trainer.Config, params: Params, tokenizer: Tokenizer, **fields: Any) -> RolloutEngine:
    sizes = {"max_prompt_tokens": job.words + 96, "max_new_tokens": 1, "max_num_seqs": 2, "steps_per_dispatch": 1}
    return greedy_engine(cfg, params, tokenizer, **sizes, **{"enable_prefix_caching": False, **fields})


def _answers(
    job: Job,
    engine: RolloutEngine,
    params: Params,
    said: Sequence[Sequence[str]] | None = None,
    order: str = "role_first",
    *,
    record: bool = True,
) -> list[list[_Answer]]:
    """Return the answers of all roles to all problems; `said`: what peers have said; None: what these answers are."""
    tokenizer: Tokenizer = TOKENIZER.build()
    seeds = [lookup_seed(_UNSEEN + number) for number in range(-2, job.problems)]
    problems = [lookup(seed, words=job.words, record=record) for seed in seeds]
    for problem in (*problems[:2], *problems[:2]):  # compiles: of two anchors, one is the text itself then
        list(_episode(engine, tokenizer, problem, None, order))
    engine.set_weights(params, engine.version + 1)  # without prefixes, bases and anchors
    known = [None] * job.problems if said is None else said
    return [list(_episode(engine, tokenizer, *one, order)) for one in zip(problems[2:], known, strict=True)]


def _episode(
    engine: RolloutEngine, tokenizer: Tokenizer, problem: Lookup, said: Sequence[str] | None, order: str
) -> Iterator[_Answer]:
    own: list[str] = []
    for role in lookup_roles():
        prompt = role_prompt(problem, role, order, said or own)
        answer = _ask(engine, tokenizer, prompt, problem)
        own.append(_said(tokenizer, answer))
        yield answer


def _said(tokenizer: Tokenizer, answer: _Answer) -> str:
    """Return what a role has said; of a policy that has not learned it, that may be nothing to show."""
    return tokenizer.decode([int(answer.scores.tokens[0, 0])]).strip() or "?"


def _ask(engine: RolloutEngine, tokenizer: Tokenizer, text: SegmentedText, problem: Lookup) -> _Answer:
    tokens, segments = encode_segments(text, tokenizer)
    before = engine.stats()
    request = Request(
        Prompt(0, "lookup", tokens), segments=segments, stop=StopConditions(max_new_tokens=1), scores="raw_logprobs"
    )
    began = time.perf_counter()
    number = engine.submit(request)
    outputs = []
    while not outputs:
        outputs = [one for one in engine.step() if one.number == number]
    seconds = time.perf_counter() - began
    (rollout,), (scores,) = outputs[0].rollouts, outputs[0].scores
    assert scores is not None
    after = engine.stats()
    more = {name: int(after[name] - before.get(name, 0)) for name in after}
    return _Answer(
        seconds,
        tokenizer.decode(rollout.tokens.tolist()) == problem.answer,
        scores,
        "kvcomm" in rollout.tags,
        more["prefill_tokens"],
        more.get("kvcomm_base_tokens", 0),
        len(tokens),
    )


def _figures(answers: list[list[_Answer]], dense: list[list[_Answer]]) -> dict[str, Any]:
    """Return the figures of one way, beside the answers to computed prompts."""
    pairs = [pair for mine, theirs in zip(answers, dense, strict=True) for pair in zip(mine, theirs, strict=True)]
    reused = [(a, b) for a, b in pairs if a.reused]
    ready = [(a, b) for a, b in reused if a.bases < a.tokens // 10]  # the long text's base was there

    def ratio(some: list[tuple[_Answer, _Answer]]) -> float | None:
        if not some:
            return None
        return statistics.median(b.seconds for _, b in some) / statistics.median(a.seconds for a, _ in some)

    total = sum(a.tokens for a, _ in pairs)
    return {
        "accuracy": statistics.mean(a.right for a, _ in pairs),
        "accuracy_of_last": statistics.mean(roles[-1].right for roles in answers),
        "kl": statistics.mean(_kl(b.scores, a.scores) for a, b in pairs),
        "kl_of_reused": statistics.mean(_kl(b.scores, a.scores) for a, b in reused) if reused else None,
        "reuse": 1 - sum(a.computed for a, _ in pairs) / total,
        "reuse_less_bases": 1 - sum(a.computed + a.bases for a, _ in pairs) / total,
        "reused_requests": len(reused) / len(pairs),
        "ttft_seconds": statistics.median(a.seconds for a, _ in pairs),
        "ttft_ratio": ratio(ready),
        "ttft_ratio_of_reused": ratio(reused),
        "ttft_ratio_of_all": statistics.mean(b.seconds for _, b in pairs)
        / statistics.mean(a.seconds for a, _ in pairs),
    }


def _kl(dense: TokenScores, other: TokenScores) -> float:
    """Return KL(dense, other) over dense's likeliest tokens; others of `other` count as its least likely one."""
    floor = float(other.top_logprobs[0].min())
    known = dict(zip(other.tokens[0].tolist(), other.top_logprobs[0].tolist(), strict=True))
    pairs = zip(dense.tokens[0].tolist(), dense.top_logprobs[0].tolist(), strict=True)
    return float(sum(np.exp(p) * (p - known.get(token, floor)) for token, p in pairs))
