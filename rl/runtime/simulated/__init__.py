"""An RL run under a virtual clock: the real control plane, with durations in the place of devices and transfers."""
