"""How a server learns that it is to end."""

from __future__ import annotations

import asyncio
import signal


class EndSignals:
    """The first SIGTERM or SIGINT sets ``stop``, for an orderly end, the second ``hurry``, for a quick one.

    Made on the loop that is to hear of them.
    """

    def __init__(self) -> None:
        self.stop, self.hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._heard)

    def _heard(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        self.stop.set()
