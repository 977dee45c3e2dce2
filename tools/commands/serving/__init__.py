"""Commands that answer over HTTP: `serve` by a policy, `service` by many adapters that are trained, too."""
