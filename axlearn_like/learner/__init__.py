"""The learner: optimizers, schedules, groups, clipping, EMA, and storage of the state."""

from axlearn_like.learner.clipping import ClipByBlockRMS, ClipByValue, SkipSpikes
from axlearn_like.learner.ema import EMA
from axlearn_like.learner.errors import LearnerError
from axlearn_like.learner.groups import ParameterGroup
from axlearn_like.learner.learner import Learner
from axlearn_like.learner.optimizers.adafactor import Adafactor
from axlearn_like.learner.optimizers.elementwise import SGD, AdamW, Lion, Optax, decay_mask
from axlearn_like.learner.optimizers.muon import Muon
from axlearn_like.learner.param_labels import Matrices
from axlearn_like.learner.schedules import (
    Constant,
    InverseSqrt,
    JoinSchedules,
    Linear,
    Schedule,
    WarmupCosine,
    WarmupLinear,
    WarmupStableDecay,
)
from axlearn_like.learner.state_storage import BFloat16State, HostOffload

__all__ = [
    "SGD",
    "Adafactor",
    "AdamW",
    "EMA",
    "BFloat16State",
    "ClipByBlockRMS",
    "ClipByValue",
    "Constant",
    "ParameterGroup",
    "HostOffload",
    "InverseSqrt",
    "JoinSchedules",
    "Learner",
    "LearnerError",
    "Linear",
    "Lion",
    "Matrices",
    "Muon",
    "Optax",
    "Schedule",
    "SkipSpikes",
    "WarmupCosine",
    "WarmupLinear",
    "WarmupStableDecay",
    "decay_mask",
]
