"""The policy trainer: batches of the controller, the update, and its publication."""
