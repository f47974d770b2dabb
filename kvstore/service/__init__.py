"""The sidecar: the store over gRPC, and its client."""
