"""`axl bench rl_update`: an update by packed rows beside one by padded rows."""
