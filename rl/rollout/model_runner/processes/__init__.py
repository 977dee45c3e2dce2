"""An engine over several processes: one of them schedules, the others make the same calls."""
