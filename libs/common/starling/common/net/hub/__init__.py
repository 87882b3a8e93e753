"""The controller's end: a ROUTER, its connections, the bytes that they send, and the telemetry."""
