"""Many policies on one fleet: what they cost beside one, and what a tenant notices of the others."""
