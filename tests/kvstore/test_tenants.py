"""The tenants file: who gets in, who does not and why, and what an operator reads when the file is wrong."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.service.tenants import Refusal, Tenant, load_tenants

SEARCH, CHAT, OPS = (
    "search-token-0123456789abcdef",
    "chat-token-0123456789abcdef",
    "ops-token-0123456789abcdef",
)
SALT, OTHER_SALT = "00" * 15 + "a1", "00" * 15 + "b2"
FIRST_OF_2027 = 1798761600.0


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def table(name: str = "search", **changes: str) -> str:
    """A valid tenant with some keys changed, added, or with an empty text left out."""
    keys = {"name": f'"{name}"', "token_sha256": f'"{digest(SEARCH)}"', "salt": f'"{SALT}"', **changes}
    return "\n".join(["[[tenant]]", *(f"{key} = {value}" for key, value in keys.items() if value), ""])


def load_error(folder: Path, text: str, mode: int = 0o600) -> str:
    with pytest.raises(ConfigError) as raised:
        load_tenants(write(folder / "tenants.toml", text, mode))
    return str(raised.value)


def test_each_token_opens_its_tenant(tmp_path: Path) -> None:
    write(tmp_path / "chat.tokens", f"{CHAT}\n\n{CHAT}-next \n")
    write(tmp_path / "chat.salt", f"{OTHER_SALT}\n")
    chat = table("chat", token_sha256="", token_file='"chat.tokens"', salt="", salt_file='"chat.salt"')
    search = table(share_bytes='"1GiB"', maps_pool="true", admin="true")
    tenants = load_tenants(write(tmp_path / "tenants.toml", search + chat))
    first = Tenant("search", bytes.fromhex(SALT), 2**30, admin=True, maps_pool=True)
    second = Tenant("chat", bytes.fromhex(OTHER_SALT), 0, admin=False, maps_pool=False)
    assert [*tenants] == [first, second]
    assert tenants.authenticate(SEARCH, FIRST_OF_2027) == first
    assert tenants.authenticate(CHAT, FIRST_OF_2027) == second
    assert tenants.authenticate(f"{CHAT}-next", FIRST_OF_2027) == second


@pytest.mark.parametrize("token", ["", SEARCH[:-1], SEARCH + " ", digest(SEARCH), "ключ", "\ud800"])
def test_any_other_token_opens_nothing(tmp_path: Path, token: str) -> None:
    tenants = load_tenants(write(tmp_path / "tenants.toml", table()))
    assert tenants.authenticate(token, FIRST_OF_2027) is Refusal.UNKNOWN


def test_two_tokens_are_valid_while_one_replaces_the_other(tmp_path: Path) -> None:
    both = f'["{digest(SEARCH)}", "{digest(CHAT)}"]'
    tenants = load_tenants(write(tmp_path / "tenants.toml", table(token_sha256=both)))
    assert tenants.authenticate(SEARCH, 0) == tenants.authenticate(CHAT, 0) == next(iter(tenants))


def test_a_token_ends_at_its_second(tmp_path: Path) -> None:
    text = table(expires="2027-01-01T01:00:00+01:00")
    tenants = load_tenants(write(tmp_path / "tenants.toml", text))
    assert tenants.authenticate(SEARCH, FIRST_OF_2027 - 0.001) == next(iter(tenants))
    assert tenants.authenticate(SEARCH, FIRST_OF_2027) is Refusal.EXPIRED
    assert tenants.authenticate(CHAT, FIRST_OF_2027) is Refusal.UNKNOWN


def test_shares_fit_into_the_pool(tmp_path: Path) -> None:
    text = table(share_bytes='"1GiB"') + table(
        "chat", token_sha256=f'"{digest(CHAT)}"', salt=f'"{OTHER_SALT}"', share_bytes='"512MiB"'
    )
    tenants = load_tenants(write(tmp_path / "tenants.toml", text))
    tenants.check_shares(3 * 2**29)
    with pytest.raises(ConfigError, match=r"add up to 1536 MiB \(search 1 GiB, chat 512 MiB\).*1 GiB: lower"):
        tenants.check_shares(2**30)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[tenant", "is not TOML"),
        ("", "names no tenant; add a [[tenant]] table"),
        ('tenant = "search"', "names no tenant"),
        ("[[tenants]]", "key tenants does not exist; did you mean tenant?"),
        (table(name="a b"), "tenant a b: name: expected up to 64 letters, digits"),
        (table(share_byte="1"), "tenant search: key share_byte does not exist; did you mean share_bytes?"),
        (table(token=f'"{SEARCH}"', token_sha256=""), "key token does not exist; did you mean token_file?"),
        (table(token_sha256=""), "tenant search: expected token_sha256 or token_file"),
        (table(token_sha256='"abc"'), "token_sha256: expected the 64 hex digits"),
        (table(token_sha256="[]"), "token_sha256: expected the 64 hex digits"),
        (table(token_sha256=f'["{digest(SEARCH)}", 7]'), "token_sha256: expected the 64 hex digits"),
        (table(salt=""), "tenant search: expected salt or salt_file"),
        (table(salt_file='"salt"'), "salt_file: "),
        (table(salt=f'"{SALT[2:]}"'), "salt: expected 16 random bytes or more in hex"),
        (table(salt='"no hex, though long enough to be one"'), "salt: expected 16 random bytes"),
        (table(expires="2027-01-01T00:00:00"), "expires: expected a time with its zone"),
        (
            table(expires='"2027-01-01T00:00:00Z"'),
            "expires: expected a time with its zone and without quotes",
        ),
        (table(share_bytes='"much"'), "share_bytes: expected a size above zero"),
        (table(admin='"yes"'), "admin: expected a valid boolean"),
        ("tenant = [1]", "tenant number 1: "),
        (
            table() + table(token_sha256=f'"{digest(CHAT)}"', salt=f'"{OTHER_SALT}"'),
            "name: expected one of its own",
        ),
        (
            table() + table("chat", token_sha256=f'"{digest(CHAT)}"'),
            "tenant chat: salt: expected one of its own",
        ),
        (
            table() + table("chat", salt=f'"{OTHER_SALT}"'),
            "tenant chat: tokens: expected each once, tenant search",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, expected: str) -> None:
    message = load_error(tmp_path, text)
    assert message.startswith(f"tenants_file {tmp_path / 'tenants.toml'}")
    assert expected in message
    assert SALT not in message
    assert SEARCH not in message
    assert digest(SEARCH) not in message


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = table(admin="1", share_bytes="0") + table("chat", salt="")
    places = [line.split(": ")[1:3] for line in load_error(tmp_path, text).splitlines()]
    assert [place for place, _ in places] == ["tenant search", "tenant search", "tenant chat"]
    assert [key for _, key in places[:2]] == ["share_bytes", "admin"]


def test_a_file_of_secrets_that_others_can_use_is_refused(tmp_path: Path) -> None:
    """Of the file itself and of each that it names."""
    path = tmp_path / "tenants.toml"
    assert load_error(tmp_path, table(), 0o604) == (
        f"tenants_file {path} has mode 0604 and holds secrets, expected that only its owner can use it; "
        "run `chmod 600` on it"
    )
    for key in ("token_file", "salt_file"):
        write(tmp_path / "secret", f"{SALT}\n", 0o644)
        kept_out = {"token_file": "token_sha256", "salt_file": "salt"}[key]
        message = load_error(tmp_path, table(**{key: '"secret"', kept_out: ""}))
        assert f"tenant search: {key}: {tmp_path / 'secret'} has mode 0644" in message


@pytest.mark.parametrize(
    ("roots", "mode", "fits"), [(True, 0o640, True), (True, 0o660, False), (False, 0o640, False)]
)
def test_a_group_may_read_what_is_roots(tmp_path: Path, roots: bool, mode: int, fits: bool) -> None:  # noqa: FBT001
    path = write(tmp_path / "tenants.toml", table(), mode)
    if os.getuid() == 0:
        os.chown(path, 0 if roots else 65534, 65534)
    elif roots:
        return  # only root can make a file that is root's
    if fits:
        assert [*load_tenants(path)]
    else:
        with pytest.raises(ConfigError, match="run `chmod 600` on it"):
            load_tenants(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", "expected random tokens"),
        ("short", "22 characters"),
    ],
)
def test_a_token_file_that_cannot_be_used(tmp_path: Path, content: str | None, expected: str) -> None:
    if content is not None:
        write(tmp_path / "tokens", content)
    message = load_error(tmp_path, table(token_sha256="", token_file='"tokens"'))
    assert f"tenant search: token_file: {tmp_path / 'tokens'}" in message
    assert expected in message
    assert "'short'" not in message


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    tenants = load_tenants(write(tmp_path / "tenants.toml", table()))
    assert SALT not in repr([*tenants])
    assert repr(bytes.fromhex(SALT)) not in repr([*tenants])


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tenants\.toml cannot be read: No such file or directory; correct"
    ):
        load_tenants(tmp_path / "tenants.toml")
    path = write(tmp_path / "tenants.toml", "")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_tenants(path)
