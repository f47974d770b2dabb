"""Metrics and health over HTTP, for scrapers and orchestrators, and a live page for people."""

from kvstore.web.history import History, Past, read
from kvstore.web.live import NAMESPACES_MAX, Live, SpaceUse
from kvstore.web.pages import Questions
from kvstore.web.readiness import Readiness, State
from kvstore.web.server import WebLimits, WebServer

__all__ = [
    "NAMESPACES_MAX",
    "History",
    "Live",
    "Past",
    "Questions",
    "Readiness",
    "SpaceUse",
    "State",
    "WebLimits",
    "WebServer",
    "read",
]
