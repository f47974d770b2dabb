"""Generated from proto/kvstore/v1 by proto/generate.py: messages and stubs. Do not edit."""
