"""A sidecar as the lowest tier of a worker, in place of Redis: blocks go through its shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvstore.config import EMBEDDED_REDIS, Config
from kvstore.errors import ConfigError
from kvstore.service.client import TLS, Client
from kvstore.service.client.tier import SidecarTier
from kvstore.spec import NamespaceSpec
from prefill.config import Role, ServeConfig

_GREET_SECONDS = 1.0
_WAYS_OUT = "set sidecar or redis_url to the same on both sides"


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """Where a sidecar is, and what it asks for: a tenant's token in a file, TLS."""

    address: str
    token_file: Path | None = None
    tls: TLS | None = None


def sidecar_of(serve: ServeConfig, config: Config) -> SidecarOptions | None:
    """The sidecar that a worker is to use. ConfigError where the store is to use Redis by itself, too."""
    if serve.sidecar is None:
        return None
    if config.redis_url is not None:
        raise ConfigError(
            f"sidecar = {serve.sidecar} and redis_url are both set, and a worker hands its blocks to one of "
            "them: the sidecar has Redis below it, so give redis_url to `kvstore serve`, and the worker none"
        )
    if config.redis_demotion != "write_through":
        raise ConfigError(
            f"redis_demotion = {config.redis_demotion} does not go with sidecar = {serve.sidecar}, which "
            "gets blocks as soon as they are computed: leave it out here, and give it to `kvstore serve`"
        )
    authority = serve.sidecar_tls_ca
    # A worker shows the certificate that it shows its clients.
    tls = None if authority is None else TLS(authority, serve.tls_cert, serve.tls_key)
    return SidecarOptions(str(serve.sidecar), serve.sidecar_token_file, tls)


def open_sidecar(options: SidecarOptions, spec: NamespaceSpec, clock: Callable[[], float]) -> SidecarTier:
    """The tier, which goes on without the sidecar while there is none. ConfigError for a wrong file."""
    token = None if options.token_file is None else _read_token(options.token_file)
    tier = SidecarTier(Client(options.address, token=token, tls=options.tls, clock=clock), [spec], clock)
    tier.greet(_GREET_SECONDS)
    return tier


def what_is_not_shared(serve: ServeConfig, config: Config) -> str | None:
    """Why workers of a group would not find each other's blocks; None where they do, or there is no group."""
    if serve.role is Role.BOTH or serve.sidecar is not None:
        return None
    if config.redis_url is None:
        return (
            f"role is {serve.role}, and neither sidecar nor redis_url is set: nothing takes blocks from one "
            f"worker to another, so the one that decodes will compute prompts once more; {_WAYS_OUT}"
        )
    if config.redis_url == EMBEDDED_REDIS:
        return (
            f"role is {serve.role} and redis_url is {EMBEDDED_REDIS}, a server of this worker alone, where "
            f"others find no blocks, so the one that decodes will compute prompts once more; {_WAYS_OUT}"
        )
    return None


def _read_token(path: Path) -> str:
    """The first line: the server's own file of a tenant may hold two while one replaces the other."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sidecar_token_file {path} cannot be read: {error}; correct the path") from error
    if not lines or not lines[0].strip():
        raise ConfigError(f"sidecar_token_file {path} has no token in its first line; write one there")
    return lines[0].strip()
