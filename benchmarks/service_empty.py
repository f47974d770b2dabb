"""A server whose look-up does nothing but receive its message: the yardstick of ``service.py``."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from typing import Any

import grpc

from kvstore.service.codec import MESSAGE_BYTES
from kvstore.v1 import lookup_pb2, lookup_pb2_grpc

OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
)


class Empty(lookup_pb2_grpc.LookupServiceServicer):
    """Parses a request, as gRPC does for every handler, and answers nothing."""

    async def Lookup(  # noqa: N802 - the name in the protocol
        self, request: lookup_pb2.LookupRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> lookup_pb2.LookupResponse:
        del request, context
        return lookup_pb2.LookupResponse()


async def main(address: str) -> None:
    """Serve until SIGTERM; one line on stdout says that it serves."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    server = grpc.aio.server(options=OPTIONS)
    lookup_pb2_grpc.add_LookupServiceServicer_to_server(Empty(), server)
    server.add_insecure_port(address)
    await server.start()
    print(json.dumps({"addresses": [address]}), flush=True)
    await stopped.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
