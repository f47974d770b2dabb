"""Generated from proto/prefill/v1 by proto/generate.py: messages and stubs. Do not edit."""
