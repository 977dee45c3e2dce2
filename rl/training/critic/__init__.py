"""Critics: a model of their own beside the policy, or a head on the policy's hidden states."""

from rl.training.critic.separate import Critic
from rl.training.critic.shared import SharedCritic

__all__ = ["Critic", "SharedCritic"]
