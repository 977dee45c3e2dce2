"""Scores of rollouts, of which some are episodes: the turns' rewards, the verifier's, and no reward for a failure."""

import dataclasses
from collections.abc import Sequence
from typing import override

from axlearn_like.tokenizers.protocol import Tokenizer, answer_text
from rl.protocol.messages import Details, Episode, Rollout, Score, TreeNode
from rl.protocol.protocols import ScoreSource
from rl.verification.scorers import Scorer


class NoScorer(Scorer):
    """The scorer of tasks whose environments give all rewards: `InlineVerifier.Config(scorer=NoScorer.Config())`."""

    def __init__(self, cfg: Scorer.Config):
        del cfg

    @override
    def score(self, problem_id: int, answer: str) -> float:
        raise LookupError("this task has no verifier; expected environments with verify=False, which end by themselves")


def score_rollouts(
    verifier: ScoreSource, rollouts: Sequence[Rollout], tokenizer: Tokenizer, details: Sequence[Details] | None = None
) -> tuple[list[str], list[Score]]:
    """Return the answer and the score of each rollout.

    The answer of an episode is what its environment has the verifier judge, "" if nothing; of other rollouts it is all
    of the text. The reward of an episode is the sum of its turns' and the verifier's; nodes have their own.

    Args:
        rollouts: the samples of a prompt one after the other, and the nodes of their plans.
        details: details of each rollout, where the verifier wants some.
    """
    answers = [answer_of(rollout, tokenizer) for rollout in rollouts]
    answered = [one.node is None and (one.episode is None or one.episode.answer is not None) for one in rollouts]
    asked = [n for n, judged in enumerate(answered) if judged]
    problems, texts = [rollouts[n].prompt_id for n in asked], [answers[n] for n in asked]
    if not asked:
        judged: Sequence[Score] = []
    elif details is None:
        judged = verifier.score(problems, texts)
    else:
        judged = verifier.score(problems, texts, [details[n] for n in asked])
    verdicts = dict(zip(asked, judged, strict=True))
    scores = [_score(one.episode, verdicts.get(n, Score(0.0))) for n, one in enumerate(rollouts)]
    samples = {(one.prompt_id, one.sample_id): score for one, score in zip(rollouts, scores, strict=True)}
    return answers, [
        score if one.node is None else _node_score(one.node, samples[one.prompt_id, one.node.sample])
        for one, score in zip(rollouts, scores, strict=True)
    ]


def _node_score(node: TreeNode, sample: Score) -> Score:
    """Return the score of a node: its own reward or its sample's, if that could be scored."""
    if sample.status != "ok":
        return sample
    return Score(sample.reward if node.reward is None else node.reward)


def answer_of(rollout: Rollout, tokenizer: Tokenizer) -> str:
    """Return the answer that the verifier judges; "" if an episode has none."""
    if rollout.episode is None:
        return answer_text(tokenizer, rollout.tokens.tolist())
    return rollout.episode.answer or ""


def _score(episode: Episode | None, verdict: Score) -> Score:
    if episode is None or verdict.status != "ok":
        return verdict
    if episode.ended == "error":
        return Score(0.0, "error", error=f"environment: {episode.error}")
    given = sum(turn.reward for turn in episode.turns)
    return dataclasses.replace(verdict, reward=verdict.reward + given) if given else verdict
