"""Files of a run: directory and lock, metrics, events, progress, object stores, full disks, stop signals."""
