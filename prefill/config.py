"""Settings of ``prefill serve``, beside those of the store that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    model_validator,
)

from kvstore.address import (
    LOOPBACK,
    Address,
    format_addresses,
    parse_address,
    parse_addresses,
    parse_tcp_address,
)
from kvstore.config import Config, require_whole_tls
from kvstore.errors import ConfigError
from kvstore.quantity import Seconds
from kvstore.settings import LoadedConfig, Source, suggestion
from prefill.scheduler import Policy

ENVIRONMENT_PREFIX = "PREFILL_"
_DECODE_REDIS_SECONDS = 5.0
_HANDOFF_PROBE_SECONDS = 0.5

STORE_SETTINGS = (
    "pool_path",
    "pool_bytes",
    "extent_bytes",
    "eviction_policy",
    "device",
    "device_bytes",
    "block_size",
    "hash_algorithm",
    "redis_url",
    "redis_prefix",
    "redis_ttl_seconds",
    "redis_acquire_seconds",
    "redis_queue_bytes",
    "lease_seconds",
    "drain_seconds",
    "log_level",
)
"""Settings of the store that ``prefill serve`` has flags for; the others come from file and environment."""


class Role(StrEnum):
    """What a worker does of a request."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Dtype(StrEnum):
    """What weights, keys and values are kept and computed in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def _some_addresses(value: object) -> tuple[Address, ...]:
    return () if value in ("none", ()) else parse_addresses(value)


def _one_address(value: object) -> object:
    return parse_address(value) if isinstance(value, str) and value != "none" else _none_or_as_given(value)


_AS_TEXT = PlainSerializer(lambda addresses: format_addresses(addresses) or "none")
Listen = Annotated[tuple[Address, ...], BeforeValidator(_some_addresses), _AS_TEXT]
Server = Annotated[Address | None, BeforeValidator(_one_address), _AS_TEXT]
HttpListen = Annotated[Address | None, BeforeValidator(parse_tcp_address), _AS_TEXT]


def _none_or_as_given(value: object) -> object:
    return None if value == "none" else value


OptionalFile = Annotated[Path | None, BeforeValidator(_none_or_as_given)]
OptionalName = Annotated[
    Annotated[str, Field(min_length=1, max_length=4096)] | None, BeforeValidator(_none_or_as_given)
]


class ServeConfig(BaseModel):
    """How one worker serves, immutable. ``load_serve_config`` makes it."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True
    )

    model: OptionalName = None
    """Hugging Face id or local folder; none is the packaged SmolLM2-135M-Instruct."""

    dtype: Dtype = Dtype.FLOAT32
    """Of weights, keys and values: float32 or bfloat16, whatever the model was saved in."""

    role: Role = Role.BOTH
    """What this worker does: both; prefill, for others to decode; or decode of what others prefill."""

    listen: Listen = (Address(host=LOOPBACK, port=9480),)
    """Addresses of the gRPC API: unix:/absolute/path, host:port, :port; or none."""

    http: HttpListen = Address(host=LOOPBACK, port=8000)
    """Address of the OpenAI-compatible API, /health and /metrics; or none."""

    prefill_at: Listen = ()
    """Addresses of the workers that prefill for this one, of role decode."""

    sidecar: Server = None
    """The `kvstore serve` that blocks go through, in place of Redis: unix:/path or host:port; or none."""

    sidecar_token_file: OptionalFile = None
    """File whose first line is the token that the sidecar asks for; or none."""

    sidecar_tls_ca: OptionalFile = None
    """PEM file with the authorities of the sidecar, which then speaks TLS; or none."""

    served_model_name: OptionalName = None
    """Name of the model in the API; by default the model's own."""

    api_key_file: OptionalFile = None
    """File whose first line clients have to send as bearer token, over HTTP and gRPC; or none."""

    tls_cert: OptionalFile = None
    """PEM file with this worker's certificate chain; with it every host:port speaks TLS. Or none."""

    tls_key: OptionalFile = None
    """PEM file with the private key of tls_cert, or none."""

    tls_client_ca: OptionalFile = None
    """PEM file with the authorities that clients' certificates must come from, or none: they need none."""

    prefill_tls_ca: OptionalFile = None
    """PEM file with the authorities of the workers in prefill_at, which then speak TLS; or none."""

    policy: Policy = Policy.FAIR
    """Which requests a step of the model takes when it cannot take all."""

    step_tokens: int = Field(default=512, ge=1, le=2**20)
    """Most tokens in one step of the model; what prompts get of it is what decode leaves."""

    chunked: bool = True
    """Whether prompts are cut at all; without, a step takes a prompt whole and decode waits for it."""

    running_max: int = Field(default=64, ge=1)
    """Requests that may hold memory at a time."""

    waiting_max: int = Field(default=256, ge=1)
    """Requests that may wait for their prefill; one more is refused and told when to come again."""

    stream_tokens: int = Field(default=1024, ge=1)
    """Tokens that a reader may lag behind; then its request is cancelled."""

    stall_seconds: Seconds = 30.0
    """Time that a client has to take a part of its answer, or to send its request."""

    default_max_tokens: int = Field(default=1024, ge=1)
    """Most tokens of a chat's answer where the request does not say; of a completion they are 16."""

    prefill_seconds: Seconds = 60.0
    """Time that a worker of prefill_at has for a prompt, its queue included; then another is asked."""

    landing_seconds: Seconds = 5.0
    """Longest wait of a prefill for its blocks to be where others find them, before it hands over."""

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role is Role.DECODE and not self.prefill_at:
            raise ValueError(
                "role = decode has no prefill_at: name the workers that prefill for it, such as "
                "--prefill-at 127.0.0.1:9480, or choose role both"
            )
        if self.role is not Role.DECODE and self.prefill_at:
            raise ValueError(
                f"role = {self.role} prefills by itself, and prefill_at = "
                f"{format_addresses(self.prefill_at)} names others: choose role decode, or leave it out"
            )
        if not self.listen and (self.http is None or self.role is Role.PREFILL):
            raise ValueError(
                f"listen = none leaves a worker of role {self.role} that nobody can ask: name an address"
            )
        return self

    @model_validator(mode="after")
    def _check_sidecar(self) -> Self:
        for name in ("sidecar_token_file", "sidecar_tls_ca"):
            if getattr(self, name) is not None and self.sidecar is None:
                raise ValueError(f"{name} is set without sidecar: name the server that it is for")
        if self.sidecar_tls_ca is not None and self.sidecar is not None and self.sidecar.path is not None:
            raise ValueError(
                f"sidecar_tls_ca is set and sidecar = {self.sidecar} is a unix socket, which has no TLS: "
                "leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        require_whole_tls(self.tls_cert, self.tls_key, self.tls_client_ca)
        if self.prefill_tls_ca is not None and not self.prefill_at:
            raise ValueError(
                "prefill_tls_ca is set without prefill_at: name the workers that it is for, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_access(self) -> Self:
        addresses = [*self.listen, *([] if self.http is None else [self.http])]
        for address in addresses:
            if self.api_key_file is None and not address.is_of_this_machine:
                raise ValueError(
                    f"{address} may be reached from other machines, which needs api_key_file, else anybody "
                    "there could use this worker: name a file with a key, or listen on 127.0.0.1 or unix:"
                )
        return self


@dataclass(frozen=True, slots=True)
class Started:
    """What a worker says once it serves: where, and what it is."""

    role: str
    model: str
    dtype: str
    grpc: list[str]
    http: str | None
    context_tokens: int


def load_serve_config(flags: Mapping[str, object], environ: Mapping[str, str]) -> ServeConfig:
    """Defaults < ``PREFILL_*`` in ``environ`` < ``flags`` by field name, where None is a flag not given.

    ConfigError with one line an offender: a variable that does not exist, a value that does not fit.
    """
    fields = ServeConfig.model_fields
    variables = {_variable(name): name for name in fields}
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    problems: list[str] = []
    for given, value in environ.items():
        if given in variables:
            values[variables[given]] = value
            origins[variables[given]] = f"environment variable {given}"
        elif given.startswith(ENVIRONMENT_PREFIX):
            problems.append(f"environment variable {given} does not exist; {suggestion(given, variables)}")
    for name, flag in flags.items():
        if flag is not None:
            values[name], origins[name] = flag, f"flag --{name.replace('_', '-')}"
    try:
        config = ServeConfig.model_validate(values)
    except ValidationError as error:
        problems += _explain(error, values, origins)
        raise ConfigError("\n".join(problems)) from error
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def config_for_role(settings: LoadedConfig, role: Role) -> Config:
    """The store's configuration, with what suits the role where nothing else was chosen.

    Workers of a machine have a pool each, and find it again when they are started again. A prefill
    worker hands whole prompts to Redis; for a decode worker they are worth waiting for, and an answer
    that came too late would have it compute a whole prompt. So would a Redis that the prefill worker
    gave up for a moment's delay.
    """
    config = settings.config
    suits: dict[str, object] = {
        "pool_path": config.pool_path.with_name(f"{config.pool_path.stem}-{role}.pool"),
    }
    if role is Role.PREFILL:
        suits["redis_queue_bytes"] = config.pool_bytes
    if role is Role.DECODE:
        suits["redis_acquire_seconds"] = max(_DECODE_REDIS_SECONDS, config.redis_probe_seconds)
    if role is not Role.BOTH:
        is_open = role is Role.DECODE and settings.sources["redis_acquire_seconds"] is Source.DEFAULT
        longest = _DECODE_REDIS_SECONDS if is_open else config.redis_acquire_seconds
        suits["redis_probe_seconds"] = min(_HANDOFF_PROBE_SECONDS, longest)
    chosen = {name: value for name, value in suits.items() if settings.sources[name] is Source.DEFAULT}
    return config.model_copy(update=chosen)


def describe_default(name: str) -> str:
    """A field's default as a flag would say it."""
    default = ServeConfig().model_dump(include={name})[name]
    if isinstance(default, float):
        return f"{default:g} s"
    return "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _explain(error: ValidationError, values: Mapping[str, object], origins: Mapping[str, str]) -> list[str]:
    lines = []
    for problem in error.errors(include_url=False, include_input=False):
        reason = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
        if problem["loc"]:
            name = str(problem["loc"][0])
            reason = f"{origins[name]} = {values[name]!r}: {reason}"
        lines.append(reason)
    return lines
