"""Tool calls read while an action is drawn: what can be started, what can only fail, and results computed ahead."""
