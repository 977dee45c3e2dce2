"""The web: access, bodies and streams over HTTP, limits on connections, metrics."""
