"""Metrics and health over HTTP, for scrapers and orchestrators."""

from kvstore.web.pages import Questions, Readiness, State
from kvstore.web.server import WebLimits, WebServer

__all__ = ["Questions", "Readiness", "State", "WebLimits", "WebServer"]
