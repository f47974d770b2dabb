"""A prefill worker as a service: the engine's thread, gRPC, and an OpenAI-compatible HTTP API."""
