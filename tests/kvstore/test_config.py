"""The configuration: what is accepted, which source wins, and what a person reads when it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from kvstore.address import Address, parse_address
from kvstore.config import EXTENTS_MAX, Config, mask_url
from kvstore.errors import ConfigError
from kvstore.settings import Source, load_config


def write_toml(folder: Path, text: str) -> Path:
    path = folder / "kvstore.toml"
    path.write_text(text, encoding="utf-8")
    return path


def load_error(
    *,
    toml_path: Path | None = None,
    environ: dict[str, str] | None = None,
    overrides: dict[str, object] | None = None,
) -> str:
    """The message of the ConfigError that these sources must cause."""
    with pytest.raises(ConfigError) as raised:
        load_config(toml_path=toml_path, environ=environ or {}, overrides=overrides or {})
    return str(raised.value)


def load_environ(**variables: str) -> Config:
    return load_config(environ=variables, overrides={}).config


def test_defaults_are_valid() -> None:
    loaded = load_config(environ={}, overrides={})
    assert loaded.config == Config()
    assert set(loaded.sources.values()) == {Source.DEFAULT}


def test_later_sources_win_and_are_named(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, 'pool_bytes = "2GiB"\nblock_size = 32\nredis_prefix = "a"\n')
    loaded = load_config(
        toml_path=toml,
        environ={"KVSTORE_BLOCK_SIZE": "64", "KVSTORE_REDIS_PREFIX": "c", "HOME": "/nowhere"},
        overrides={"redis_prefix": "b", "block_size": None},
    )
    assert loaded.config.pool_bytes == 2 * 2**30
    assert loaded.config.block_size == 64
    assert loaded.config.redis_prefix == "b"
    assert {name: source for name, source in loaded.sources.items() if source != Source.DEFAULT} == {
        "pool_bytes": Source.FILE,
        "block_size": Source.ENVIRONMENT,
        "redis_prefix": Source.FLAG,
    }


def test_the_process_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_BLOCK_SIZE", "64")
    monkeypatch.setenv("BLOCK_SIZE", "64")
    assert Config().block_size == 16
    assert load_config(environ={}, overrides={}).config.block_size == 16


def test_config_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30),
        ("512 MiB", 2**29),
        ("0.5GiB", 2**29),
        ("268435456", 2**28),
        ("1GB", 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert load_environ(KVSTORE_POOL_BYTES=text).pool_bytes == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("45", 45.0), ("500ms", 0.5), ("30s", 30.0), ("2h", 7200.0), ("1.5 m", 90.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert load_environ(KVSTORE_LEASE_SECONDS=text).lease_seconds == seconds


@pytest.mark.parametrize(
    ("url", "stored"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("rediss://user:secret@cache.example:6380", "rediss://user:secret@cache.example:6380"),
        ("unix:///run/valkey.sock?db=1", "unix:///run/valkey.sock?db=1"),
        ("embedded", "embedded"),
        ("none", None),
    ],
)
def test_redis_urls(url: str, stored: str | None) -> None:
    assert load_environ(KVSTORE_REDIS_URL=url).redis_url == stored


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("KVSTORE_POOL_BYTES", "1 gigabyte", "expected a size"),
        ("KVSTORE_POOL_BYTES", "0", "expected a size above zero"),
        ("KVSTORE_POOL_BYTES", "-1GiB", "expected a size above zero"),
        ("KVSTORE_POOL_BYTES", "1.5", "whole bytes"),
        ("KVSTORE_POOL_BYTES", "", "expected a size"),
        ("KVSTORE_EXTENT_BYTES", "3", "expected greater than or equal to 4096"),
        ("KVSTORE_POOL_PATH", "kv.pool", "expected an absolute path"),
        ("KVSTORE_LEASE_SECONDS", "0s", "expected a duration above zero"),
        ("KVSTORE_LEASE_SECONDS", "30 parsecs", "expected a duration"),
        ("KVSTORE_LEASE_SECONDS", "nan", "expected a duration"),
        ("KVSTORE_REDIS_TTL_SECONDS", "10ms", "greater than or equal to 1"),
        ("KVSTORE_BLOCK_SIZE", "0", "greater than or equal to 1"),
        ("KVSTORE_BLOCK_SIZE", "sixteen", "valid integer"),
        ("KVSTORE_HASH_ALGORITHM", "md5", "'xxh3_128' or 'sha256'"),
        ("KVSTORE_DEVICE", "gpu", "expected cpu, cuda or cuda:N"),
        ("KVSTORE_REDIS_PREFIX", "kv{a}", "without braces"),
        ("KVSTORE_REDIS_URL", "http://127.0.0.1", "expected redis://"),
        ("KVSTORE_REDIS_URL", "redis://", "expected redis://"),
        ("KVSTORE_REDIS_URL", "redis://127.0.0.1:99999", "expected redis://"),
        ("KVSTORE_REDIS_URL", "redis://[::1", "expected redis://"),
        ("KVSTORE_HASH_ALGORITHM", "md5", "expected 'xxh3_128' or 'sha256'"),
        ("KVSTORE_LISTEN", "", "expected unix:/absolute/path, host:port, or :port"),
        ("KVSTORE_LISTEN", "unix:kv.sock", "expected an absolute path of at most 107 bytes after unix:"),
        ("KVSTORE_LISTEN", f"unix:/{'x' * 107}", "at most 107 bytes"),
        ("KVSTORE_LISTEN", "127.0.0.1", "expected unix:/absolute/path, host:port"),
        ("KVSTORE_LISTEN", "127.0.0.1:65536", "expected unix:/absolute/path, host:port"),
        ("KVSTORE_LISTEN", "http://127.0.0.1:80", "expected unix:/absolute/path, host:port"),
        ("KVSTORE_LISTEN", "[127.0.0.1]:80", "is no IPv6 address"),
        ("KVSTORE_LISTEN", "::1:80", "expected unix:/absolute/path, host:port"),
        ("KVSTORE_LISTEN", ":80, 127.0.0.1:80", "leave one 127.0.0.1:80 out"),
        ("KVSTORE_HTTP_LISTEN", "unix:/run/kv.sock", "expected host:port, :port"),
        ("KVSTORE_HTTP_LISTEN", "9470", "expected unix:/absolute/path, host:port"),
        ("KVSTORE_TLS_CERT", "", "expected the path of a file, or none"),
        ("KVSTORE_CLIENT_LEASES", "0", "greater than or equal to 1"),
        ("KVSTORE_CLIENT_STREAMS", "many", "valid integer"),
        ("KVSTORE_CLIENT_STAGED_BYTES", "0", "expected a size above zero"),
        ("KVSTORE_DRAIN_SECONDS", "0", "expected a duration above zero"),
        ("KVSTORE_LOG_LEVEL", "loud", "expected 'debug', 'info', 'warning' or 'error'"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(variable: str, value: str, expected: str) -> None:
    message = load_error(environ={variable: value})
    assert message.startswith(f"environment variable {variable} = {value!r}: ")
    assert expected in message


def test_a_bad_value_is_named_as_its_source_spells_it(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, "pool_bytes = true\n")
    assert load_error(toml_path=toml).startswith(f"{toml}: key pool_bytes = True: expected a size")
    message = load_error(overrides={"lease_seconds": "soon"})
    assert message.startswith("flag --lease-seconds = 'soon': expected a duration")


def test_every_bad_value_is_reported_at_once() -> None:
    message = load_error(environ={"KVSTORE_BLOCK_SIZE": "0", "KVSTORE_DEVICE": "gpu"})
    assert [line.split(" = ")[0] for line in message.splitlines()] == [
        "environment variable KVSTORE_DEVICE",
        "environment variable KVSTORE_BLOCK_SIZE",
    ]


def test_an_unknown_key_is_an_error_with_the_nearest_name(tmp_path: Path) -> None:
    """LMCache #1244, #447, #2854."""
    toml = write_toml(tmp_path, "pool_byte = 1\n")
    message = load_error(
        toml_path=toml,
        environ={"KVSTORE_LEASE_SECS": "1", "KVSTORE_redis_prefix": "kv"},
        overrides={"redis_uri": "embedded"},
    )
    assert message.splitlines() == [
        f"{toml}: key pool_byte does not exist; did you mean pool_bytes?",
        "environment variable KVSTORE_LEASE_SECS does not exist; did you mean KVSTORE_LEASE_SECONDS?",
        "environment variable KVSTORE_redis_prefix does not exist; did you mean KVSTORE_REDIS_PREFIX?",
        "flag --redis-uri does not exist; did you mean --redis-url?",
    ]


def test_a_table_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, "[memory]\npool_bytes = 1\n[[redis_url]]\nhost = 1\n")
    rule = "is a table, but there are no tables; write its keys at the top of the file, without a heading"
    assert load_error(toml_path=toml).splitlines() == [
        f"{toml}: key memory {rule}",
        f"{toml}: key redis_url {rule}",
    ]


def test_wrong_names_and_wrong_values_are_reported_at_once(tmp_path: Path) -> None:
    toml = write_toml(tmp_path, 'pool_byte = "2GiB"\nextent_bytes = "2GiB"\nblock_size = 0\n[memory]\n')
    lines = load_error(toml_path=toml, environ={"KVSTORE_DEVICE": "gpu"}).splitlines()
    assert lines[:2] == [
        f"{toml}: key pool_byte does not exist; did you mean pool_bytes?",
        f"{toml}: key memory is a table, but there are no tables; write its keys at the top of the file, "
        "without a heading",
    ]
    assert [line.partition(" = ")[0] for line in lines[2:]] == [
        "environment variable KVSTORE_DEVICE",
        f"{toml}: key block_size",
    ]


def test_what_all_names_begin_with_makes_none_of_them_likely() -> None:
    told = load_error(environ={"KVSTORE_NOPE": "1"})
    assert "variable KVSTORE_NOPE does not exist; expected one of KVSTORE_BLOCK_SIZE, " in told


def test_a_misspelled_name_is_not_told_as_a_contradiction(tmp_path: Path) -> None:
    """With pool_bytes spelled right there is none."""
    toml = write_toml(tmp_path, 'pool_byte = "4GiB"\nextent_bytes = "2GiB"\n')
    assert load_error(toml_path=toml) == f"{toml}: key pool_byte does not exist; did you mean pool_bytes?"


def test_the_smallest_extents_and_the_most_of_them_are_accepted() -> None:
    config = load_environ(KVSTORE_EXTENT_BYTES="4KiB", KVSTORE_POOL_BYTES="1GiB")
    assert config.pool_bytes // config.extent_bytes == EXTENTS_MAX


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"pool_bytes": "32MiB"}, ["pool_bytes = 32 MiB", "extent_bytes = 64 MiB"]),
        (
            {"pool_bytes": "1TiB", "extent_bytes": "2MiB"},
            ["pool_bytes = 1 TiB has 524288 extents of extent_bytes = 2 MiB", "at most 262144", "to 4 MiB"],
        ),
        (
            {"pool_bytes": 2**30 + 4096, "extent_bytes": 4096},
            [
                "has 262145 extents of extent_bytes = 4 KiB",
                "raise extent_bytes to 8 KiB, or lower pool_bytes",
            ],
        ),
        ({"redis_probe_seconds": 1}, ["redis_probe_seconds = 1", "redis_acquire_seconds = 0.5"]),
        ({"tls_cert": "a.pem"}, ["tls_cert is set without tls_key", "set tls_key too"]),
        ({"tls_key": "a.pem"}, ["tls_key is set without tls_cert"]),
        ({"tls_client_ca": "a.pem"}, ["tls_client_ca is set without tls_cert and tls_key"]),
    ],
)
def test_values_that_contradict_each_other(overrides: dict[str, object], named: list[str]) -> None:
    message = load_error(overrides=overrides)
    assert all(part in message for part in named), message


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("unix:/run/kv.sock", [Address(path=Path("/run/kv.sock"))]),
        (":0, :0", [Address(host="127.0.0.1"), Address(host="127.0.0.1")]),
        ("localhost:9471,[::1]:9471", [Address(host="localhost", port=9471), Address(host="::1", port=9471)]),
    ],
)
def test_addresses(text: str, addresses: list[Address]) -> None:
    config = load_environ(KVSTORE_LISTEN=text)
    assert list(config.listen) == addresses
    assert load_environ(KVSTORE_LISTEN=",".join(map(str, addresses))) == config


def test_an_address_is_shown_as_it_is_given() -> None:
    loaded = load_config(environ={"KVSTORE_LISTEN": "unix:/a,[::1]:7"}, overrides={"http_listen": "none"})
    shown = {row.field: row.value for row in loaded.describe()}
    assert (shown["listen"], shown["http_listen"]) == ("unix:/a,[::1]:7", "none")


@pytest.mark.parametrize("text", ["unix:/a", "127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"])
def test_an_address_of_this_machine_needs_neither_tenants_nor_tls(text: str) -> None:
    assert load_environ(KVSTORE_LISTEN=text).listen == (parse_address(text),)


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "cache.example:1"])
def test_an_address_that_others_reach_needs_tenants_and_tls(text: str) -> None:
    """Without tenants everybody may do everything, and without TLS tokens can be read on the way."""
    needed: dict[str, object] = {"tenants_file": "t.toml", "tls_cert": "c.pem", "tls_key": "k.pem"}
    assert load_config(environ={"KVSTORE_LISTEN": text}, overrides=needed).config.tenants_file == Path(
        "t.toml"
    )
    for left_out, missing in (
        (["tenants_file"], "there is no tenants_file: set"),
        (["tls_cert", "tls_key"], "there is no tls_cert: set"),
        (list(needed), "there is no tenants_file and no tls_cert: set"),
    ):
        given = {name: value for name, value in needed.items() if name not in left_out}
        message = load_error(environ={"KVSTORE_LISTEN": f"unix:/a,{text}"}, overrides=given)
        assert message.startswith(f"listen = {text} may be reached from other machines")
        assert missing in message


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "absent.toml"
    assert load_error(toml_path=missing) == (
        f"configuration file {missing} cannot be read: No such file or directory"
    )
    assert "is not TOML" in load_error(toml_path=write_toml(tmp_path, "pool_bytes: 1\n"))


def test_describe_gives_every_field_with_its_source_in_order() -> None:
    rows = load_config(
        environ={"KVSTORE_LEASE_SECONDS": "500ms"}, overrides={"pool_bytes": 96 * 2**20}
    ).describe()
    assert [row.field for row in rows] == list(Config.model_fields)
    shown = {row.field: (row.value, row.source) for row in rows}
    assert shown["pool_bytes"] == ("96 MiB", Source.FLAG)
    assert shown["lease_seconds"] == ("0.5 s", Source.ENVIRONMENT)
    assert shown["redis_url"] == ("none", Source.DEFAULT)


def test_a_password_is_shown_nowhere() -> None:
    """The effective configuration is printed, its secrets are not."""
    url = "redis://user:hunter2@cache.example:6379/0"
    loaded = load_config(environ={"KVSTORE_REDIS_URL": url}, overrides={})
    assert loaded.config.redis_url == url
    assert "redis://user:***@cache.example:6379/0" in [row.value for row in loaded.describe()]
    assert "hunter2" not in repr(loaded) + str(loaded.describe())

    with pytest.raises(ConfigError) as raised:
        load_config(environ={"KVSTORE_REDIS_URL": url.replace("redis:", "http:")}, overrides={})
    assert "hunter2" not in str(raised.value) + str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://127.0.0.1:6379", "redis://127.0.0.1:6379"),
        ("redis://:p@ss@host", "redis://:***@host"),
        ("redis://user@host", "redis://user@host"),
        ("redis://host?db=1&password=s3&protocol=2", "redis://host?db=1&password=***&protocol=2"),
        ("user:pw@host", "user:***@host"),
        ("rediss://host?ssl_password=s3&db=1", "rediss://host?ssl_password=***&db=1"),
    ],
)
def test_mask_url(url: str, masked: str) -> None:
    assert mask_url(url) == masked


def test_a_configuration_goes_through_json() -> None:
    """As one process hands it to another."""
    config = Config(listen="unix:/dev/shm/a.sock,:0", http_listen="none")
    assert load_config(environ={}, overrides=config.model_dump(mode="json")).config == config
