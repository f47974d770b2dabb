"""What vLLM asks of a connector and what ours has, as JSON: importing vLLM warns, which tests forbid."""

from __future__ import annotations

import json
import sys

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.engine import require_supported_version
from kvstore.connectors.vllm.errors import UnsupportedError


def refusal(version: str) -> str:
    try:
        require_supported_version(version)
    except UnsupportedError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    found = {
        "ours": [name for name in vars(KVStoreConnector) if not name.startswith("_")],
        "theirs": dir(KVConnectorBase_V1),
        "abstract": sorted(KVStoreConnector.__abstractmethods__),
        "hma": supports_hma(KVStoreConnector),
        "refusals": {version: refusal(version) for version in ("0.31.4", "0.32.1+cpu", "0.33.0", "1.0")},
    }
    sys.stdout.write(json.dumps(found) + "\n")
