"""The four steps from a batch of the controller to the arrays of an update (take, score, fill, inputs)."""
