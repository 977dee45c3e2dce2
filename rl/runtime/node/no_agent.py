"""A process that stands for an agent, which a raylet must have: it waits until the raylet has ended."""

import os
import time

if __name__ == "__main__":
    raylet = os.getppid()
    while os.getppid() == raylet:
        time.sleep(1.0)
