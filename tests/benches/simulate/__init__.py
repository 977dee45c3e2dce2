"""`axl bench simulate`: real runs against their simulation, and what a simulation costs."""
