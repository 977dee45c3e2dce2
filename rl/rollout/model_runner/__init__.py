"""The device side of the engine: weights, the page pool, and compiled dispatches of few shapes."""
