"""The controller: the plan of every update, its ledger, and the leases of rollout workers."""
