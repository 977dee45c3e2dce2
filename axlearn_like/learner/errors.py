"""The error of learner settings that do not fit the parameters."""

from mesh.errors import UserError


class LearnerError(UserError, ValueError):
    """A setting of the learner that does not fit the parameters, or another setting."""
