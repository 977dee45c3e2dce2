"""`axl bench experts`: replicas of popular experts, and attention and experts on two groups of devices."""
