"""Processes of one machine of a Ray cluster that we start: no more than place and hold actors."""

# Ray's variables for each of its processes, where we start Ray: in this process, or on the machines of a launched run.
RAY = {
    # Ray would start as many processes ahead as it believes that there are cores; most would stay idle.
    "RAY_prestart_worker_first_driver": "0",
    # By default Ray runs actors at nice 15, below everything else on the machine.
    "RAY_worker_niceness": "0",
    # Roles that ask Ray for no accelerator keep their view of it.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # No events of calls: `gcs_server` keeps those of 100,000 calls, and grows by 5 MiB a minute until it has them.
    "RAY_task_events_report_interval_ms": "0",
}
