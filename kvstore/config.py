"""Every setting of the store: default, unit, range and meaning."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from kvstore.address import LOOPBACK, Address, format_addresses, parse_addresses, parse_tcp_address
from kvstore.quantity import Bytes, Seconds, format_bytes

EMBEDDED_REDIS = "embedded"
"""``redis_url`` that stands for a Valkey server started by this process."""

PREFILL_ONLY = (
    "block_size",
    "hash_algorithm",
    "device",
    "device_bytes",
    "device_share",
    "redis_acquire_seconds",
)
"""Settings that a worker with a model uses; to a server each client says its own."""

EXTENT_BYTES_MIN = 4096
EXTENTS_MAX = 2**18
"""Extents that a pool may have: each costs the server a table, however small it is."""

_MASK = "***"

# Whether each needs a host, and whether a path: that of a socket, or the name of a service.
_REDIS_SCHEMES = {
    "redis": (True, False),
    "rediss": (True, False),
    "unix": (False, True),
    "redis+sentinel": (True, True),
    "rediss+sentinel": (True, True),
    "redis+cluster": (True, False),
    "rediss+cluster": (True, False),
}


def _parse_redis_url(value: object) -> str | None:
    expected = (
        "expected redis://, rediss:// or unix:// with a host or a socket path, redis+sentinel:// with hosts "
        "and the name of a service, or redis+cluster:// with hosts, such as redis://127.0.0.1:6379/0 or "
        f"redis+cluster://a:6379,b:6379; or the word {EMBEDDED_REDIS} or none"
    )
    if value is None or value == "none":
        return None
    if value == EMBEDDED_REDIS:
        return EMBEDDED_REDIS
    if not isinstance(value, str):
        raise ValueError(expected)
    try:
        parts = urlsplit(value)
        needs_host, needs_path = _REDIS_SCHEMES[parts.scheme]
        hosts = [urlsplit(f"//{host}") for host in parts.netloc.rpartition("@")[2].split(",")]
        _ = [host.port for host in hosts]  # raises on a port that is no number below 65,536
    except (ValueError, KeyError) as error:
        raise ValueError(expected) from error
    missing = (needs_host and not all(host.hostname for host in hosts)) or (
        needs_path and not parts.path.strip("/")
    )
    if missing or (len(hosts) > 1 and "+" not in parts.scheme):
        raise ValueError(expected)
    return value


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("expected an absolute path, since other processes open the file by it")
    return path


def _path_or_none(value: object) -> object:
    if value == "":
        raise ValueError("expected the path of a file, or none")
    return _none_or_as_given(value)


def _none_or_as_given(value: object) -> object:
    return None if value == "none" else value


def _matching(pattern: str, expected: str) -> AfterValidator:
    def check(value: str) -> str:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(check)


_AS_TEXT = PlainSerializer(format_addresses)
Listen = Annotated[tuple[Address, ...], BeforeValidator(parse_addresses), _AS_TEXT]
HttpListen = Annotated[Address | None, BeforeValidator(parse_tcp_address), _AS_TEXT]
OptionalPath = Annotated[Path | None, BeforeValidator(_path_or_none)]
RedisUrl = Annotated[str | None, BeforeValidator(_parse_redis_url)]
Device = Annotated[str, _matching(r"cpu|cuda(:\d+)?", "cpu, cuda or cuda:N")]
OptionalShare = Annotated[Annotated[float, Field(gt=0, lt=1)] | None, BeforeValidator(_none_or_as_given)]
OptionalSeconds = Annotated[Seconds | None, BeforeValidator(_none_or_as_given)]
OptionalRate = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_none_or_as_given)]
KeyPrefix = Annotated[str, _matching(r"[^{}\s]+", "one or more characters without braces or spaces")]


def require_whole_tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """ValueError where one of a pair of files for TLS is missing, or the pair beside an authority."""
    if (cert is None) != (key is None):
        given, missing = ("tls_key", "tls_cert") if cert is None else ("tls_cert", "tls_key")
        raise ValueError(f"{given} is set without {missing}: TLS needs both, set {missing} too")
    if client_ca is not None and cert is None:
        raise ValueError(
            "tls_client_ca is set without tls_cert and tls_key: clients can prove who they are by "
            "certificate only to a server that has one, set both too"
        )


class Config(BaseModel):
    """All settings, immutable. A size is in bytes, a duration in seconds, whatever unit it was given in.

    Constructing it reads neither files nor the environment: ``load_config`` is given both.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        hide_input_in_errors=True,  # a Redis URL may hold a password
    )

    pool_path: Annotated[Path, AfterValidator(_absolute)] = Path("/dev/shm/prefix-kvstore.pool")
    """File of the host tier, on a tmpfs; clients on this machine map it."""

    pool_bytes: Bytes = 2**30
    """Size of the host tier, reserved in full."""

    extent_bytes: Bytes = Field(default=64 * 2**20, ge=EXTENT_BYTES_MIN)
    """Piece of a pool that serves one slot size at a time; a pool may have 262144 of them."""

    device: Device = "cpu"
    """Torch device of the device tier: cpu, cuda or cuda:N."""

    device_bytes: Bytes = 2**30
    """Size of the device tier."""

    device_share: OptionalShare = None
    """Take this share (as 0.5) of what is free on the CUDA device instead of device_bytes; or none."""

    block_size: int = Field(default=16, ge=1)
    """Tokens in a block, the unit of hashing and of reuse."""

    hash_algorithm: Literal["xxh3_128", "sha256"] = "xxh3_128"
    """Block hash; sha256 where tenants do not trust each other."""

    redis_url: RedisUrl = Field(default=None, repr=False)
    """Redis or Valkey (docs/redis.md); embedded starts a Valkey beside this process, none does without."""

    redis_prefix: KeyPrefix = "kv"
    """First part of every key in Redis; no spaces, and no braces: those mark a hash tag in Redis Cluster."""

    redis_ttl_seconds: Seconds = Field(default=86400, ge=1)
    """Time after its last use at which Redis forgets a block; at least one second."""

    redis_connections: int = Field(default=2, ge=1, le=64)
    """Connections to each Redis node that carry payloads."""

    eviction_policy: Literal["lru", "lfu", "s3fifo", "arc", "reuse"] = "lru"
    """Which blocks of the host tier go first when it is full; docs/policies.md says how to choose."""

    idle_ttl_seconds: OptionalSeconds = None
    """Time after its last use at which a block leaves memory, whatever the policy keeps; or none."""

    redis_probe_seconds: Seconds = 0.05
    """Longest wait for Redis to say which blocks it has."""

    redis_acquire_seconds: Seconds = 0.5
    """Longest wait for Redis to deliver the blocks of one request, the probe included."""

    redis_queue_bytes: Bytes = 256 * 2**20
    """Payloads that may wait for Redis to take them; beyond it, writes to Redis are dropped and counted."""

    redis_demotion: Literal["write_through", "on_evict", "on_reuse"] = "write_through"
    """When blocks go to Redis: once stored, when memory gives them up, or once reused (docs/redis.md)."""

    redis_reuse_count: int = Field(default=1, ge=1)
    """How often a block is hit before it goes to Redis with on_reuse."""

    recompute_tokens_per_second: OptionalRate = None
    """Prompt tokens a second that the engine computes; what loads slower from Redis is a miss. Or none."""

    lease_seconds: Seconds = 30
    """Time for which acquired blocks stay readable without a renewal."""

    write_seconds: Seconds = 30
    """Time a writer has between staging blocks and committing them."""

    listen: Listen = (Address(path=Path("/dev/shm/prefix-kvstore.sock")),)
    """Addresses of the gRPC server, with commas between them: unix:/absolute/path, host:port, :port."""

    http_listen: HttpListen = Address(host=LOOPBACK, port=9470)
    """Address of the page, /metrics, /healthz, /readyz, without TLS: counts, models, no prompts; or none."""

    tls_cert: OptionalPath = None
    """PEM file with the server's certificate chain; with it every host:port speaks TLS. Or none."""

    tls_key: OptionalPath = None
    """PEM file with the private key of tls_cert, or none."""

    tls_client_ca: OptionalPath = None
    """PEM file with the authorities that clients' certificates must come from, or none: they need none."""

    tenants_file: OptionalPath = None
    """TOML file of tenants and their tokens, read again at SIGHUP; or none: whoever connects may use all."""

    client_leases: int = Field(default=4096, ge=1)
    """Leases that one client may hold at a time."""

    client_staged_bytes: Bytes = 2**30
    """Bytes that one client may have staged and not yet committed."""

    client_streams: int = Field(default=16, ge=1)
    """Streams of payloads that one client may have open at a time."""

    drain_seconds: Seconds = 10
    """Time that a server which is told to stop gives its clients, and Redis for what is queued for it."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important messages that are logged."""

    log_format: Literal["human", "json"] = "human"
    """Lines for people, or one JSON object a line."""

    log_file: OptionalPath = None
    """File to log to, opened anew when it is moved away; or none: stderr."""

    record_path: OptionalPath = None
    """File to record requests in, for `kvstore simulate`: salted names, no tokens; packed as .gz; or none."""

    record_max_bytes: Bytes = 2**30
    """Size of a recording at which it ends."""

    @model_validator(mode="after")
    def _check_extents(self) -> Self:
        pool, extent = format_bytes(self.pool_bytes), format_bytes(self.extent_bytes)
        if self.pool_bytes < self.extent_bytes:
            raise ValueError(
                f"pool_bytes = {pool} is less than one extent, extent_bytes = {extent}: raise the first or "
                "lower the second"
            )
        extents = self.pool_bytes // self.extent_bytes
        if extents > EXTENTS_MAX:
            least = -(-self.pool_bytes // EXTENTS_MAX)
            raise ValueError(
                f"pool_bytes = {pool} has {extents} extents of extent_bytes = {extent}, at most "
                f"{EXTENTS_MAX} are possible: raise extent_bytes to "
                f"{format_bytes(1 << (least - 1).bit_length())}, or lower pool_bytes"
            )
        return self

    @model_validator(mode="after")
    def _check_waits(self) -> Self:
        if self.redis_probe_seconds > self.redis_acquire_seconds:
            raise ValueError(
                f"redis_probe_seconds = {self.redis_probe_seconds:g} is longer than "
                f"redis_acquire_seconds = {self.redis_acquire_seconds:g}, which includes it: "
                "lower the first or raise the second (a key of the file, or KVSTORE_REDIS_ACQUIRE_SECONDS)"
            )
        return self

    @model_validator(mode="after")
    def _check_device(self) -> Self:
        if self.device_share is not None and self.device == "cpu":
            raise ValueError(
                f"device_share = {self.device_share:g} is a share of a GPU's free memory, and device is cpu: "
                "set device to cuda, or use device_bytes"
            )
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        require_whole_tls(self.tls_cert, self.tls_key, self.tls_client_ca)
        lacking = [name for name in ("tenants_file", "tls_cert") if getattr(self, name) is None]
        for address in self.listen:
            if lacking and not address.is_of_this_machine:
                raise ValueError(
                    f"listen = {address} may be reached from other machines, which needs tenants_file (else "
                    "anybody there could read and write blocks) and tls_cert (else tokens and prompts could "
                    f"be read on the way), but there is no {' and no '.join(lacking)}: set what is missing, "
                    "or listen on 127.0.0.1 or unix:"
                )
        return self


def mask_url(url: str) -> str:
    """The URL with any password replaced, so that it can be logged; malformed URLs too."""
    head, at, place = url.rpartition("@")
    if at:
        scheme, slashes, login = head.rpartition("://")
        user, colon, _password = login.partition(":")
        url = f"{scheme}{slashes}{user}{colon}{_MASK if colon else ''}@{place}"
    return re.sub(r"(?i)(password=)[^&#]*", rf"\g<1>{_MASK}", url)
