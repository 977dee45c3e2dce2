"""The unified objective: components, the form that joins them, and named algorithms."""

from rl.objective.advantage import (
    AcceptedOnly,
    Advantage,
    BatchAdvantage,
    GroupAdvantage,
    LeaveOneOutAdvantage,
    NegativeReward,
    NoAdvantage,
    OptimalBaselineAdvantage,
    RawReward,
    SuccessNormalisedAdvantage,
)
from rl.objective.aggregation import (
    Aggregation,
    MaxLengthMean,
    PromptMean,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from rl.objective.diagnostics import combine_metrics, derived_metrics
from rl.objective.gae import CriticConfig, GeneralisedAdvantage, RewardToGo
from rl.objective.importance import Importance, NoImportance, RolloutRejection, TruncatedImportance
from rl.objective.objective import Objective, Prepared
from rl.objective.parts import NodeAdvantage, TurnAdvantage
from rl.objective.presets import PRESETS
from rl.objective.regulariser import (
    EntropyBonus,
    NoRegulariser,
    ReferenceKL,
    Regulariser,
    Sum,
    kl_k1,
    kl_k2,
    kl_k3,
)
from rl.objective.reward_shaping import ReferencePenalty, RewardShaping, SoftOverlongPenalty
from rl.objective.surrogate import (
    ClippedSurrogate,
    ClippedWeightLogProbability,
    LogProbability,
    MixedPolicy,
    Ratio,
    SoftGate,
    Surrogate,
)
from rl.objective.tokens import Tokens

__all__ = [
    "PRESETS",
    "AcceptedOnly",
    "Advantage",
    "Aggregation",
    "BatchAdvantage",
    "ClippedSurrogate",
    "ClippedWeightLogProbability",
    "CriticConfig",
    "EntropyBonus",
    "GeneralisedAdvantage",
    "GroupAdvantage",
    "TurnAdvantage",
    "NodeAdvantage",
    "Importance",
    "LeaveOneOutAdvantage",
    "LogProbability",
    "MaxLengthMean",
    "MixedPolicy",
    "NegativeReward",
    "NoAdvantage",
    "NoImportance",
    "NoRegulariser",
    "Objective",
    "OptimalBaselineAdvantage",
    "Prepared",
    "PromptMean",
    "Ratio",
    "RawReward",
    "ReferenceKL",
    "ReferencePenalty",
    "Regulariser",
    "RewardShaping",
    "RewardToGo",
    "RolloutRejection",
    "SequenceMean",
    "SequenceSum",
    "SoftGate",
    "SoftOverlongPenalty",
    "SuccessNormalisedAdvantage",
    "Sum",
    "Surrogate",
    "TokenMean",
    "Tokens",
    "TruncatedImportance",
    "combine_metrics",
    "derived_metrics",
    "kl_k1",
    "kl_k2",
    "kl_k3",
]
