"""Certificates for servers and clients of tests."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Authority:
    """A certificate authority of our own, made by openssl in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self._folder = folder
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        self._openssl(
            "req", "-x509", *self._new_key(self._key), "-days", "2", "-subj", f"/CN={name}", "-out", self.cert
        )

    def issue(self, name: str, alternatives: str) -> tuple[Path, Path]:
        """(Certificate, key) signed by this authority."""
        cert, key, request = (self._folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName = {alternatives}\n", encoding="utf-8")
        self._openssl("req", *self._new_key(key), "-subj", f"/CN={name}", "-out", request)
        signed_by = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial")
        self._openssl(
            "x509", "-req", "-in", request, *signed_by, "-days", "2", "-extfile", extensions, "-out", cert
        )
        return cert, key

    @staticmethod
    def _new_key(path: Path) -> tuple[str | Path, ...]:
        return "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path

    @staticmethod
    def _openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True)
