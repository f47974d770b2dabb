"""The kernels of ``device_copy.cu`` on this machine: a loop over blocks and threads, each access checked."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import pytest

_SOURCE = Path(__file__).parent / "native" / "kernel_shim.cpp"

Kernel = Callable[[tuple[int], tuple[int], Sequence[int]], None]
"""Called with grid, threads and arguments, as CuPy's are."""


class Shim:
    """Compiled kernels, the memory that they may touch, and how often they touched other memory."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_region.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._library.shim_faults.restype = ctypes.c_longlong
        pointer, number, size = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_uint
        self._library.shim_launch.argtypes = (
            *(pointer, size, size, pointer, number, number),
            *(pointer, pointer, number, number),
        )

    def forget(self) -> None:
        """Nothing is allowed, nothing was wrong."""
        self._library.shim_reset()

    def allow(self, address: int, size: int, *, writable: bool) -> None:
        self._library.shim_region(address, size, writable)

    def faults(self) -> int:
        """Accesses out of bounds, or not at a multiple of their own size."""
        return int(self._library.shim_faults())

    def kernel(self, name: str) -> Kernel:
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)

        def launch(grid: tuple[int], threads: tuple[int], arguments: Sequence[int]) -> None:
            self._library.shim_launch(address, *grid, *threads, *map(int, arguments))

        return launch


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler; install g++")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    include = f"-I{resources.files('kvstore.tiers')}"
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-Werror", "-shared", "-fPIC", include, str(_SOURCE)]
    subprocess.run([*command, "-o", str(library)], check=True, timeout=60)
    return Shim(library)
