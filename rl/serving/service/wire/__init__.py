"""The Tinker API over HTTP: routes, protobuf messages, promises, tenants and their sessions."""
