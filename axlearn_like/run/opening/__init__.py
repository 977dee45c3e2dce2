"""What is asked and kept when a run directory is opened: who owns it, which config goes on, and how to put it back."""
