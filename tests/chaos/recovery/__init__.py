"""Recovery of a run under kills: seconds to the next update, and the same bits (`python -m tests.chaos.recovery`)."""
