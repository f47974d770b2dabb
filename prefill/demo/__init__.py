"""The demo: what the cache does for conversations, on a real model and a real server."""
