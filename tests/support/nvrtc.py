"""NVIDIA's runtime compiler, which needs no GPU, from the wheel that carries it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Compiled:
    """What came of a compilation; ``status`` 0 is success."""

    status: int
    log: str
    ptx: str


def compile_for(source: str, architecture: str) -> Compiled:
    """Compile CUDA source as the product does, to the PTX of an architecture such as ``sm_90``."""
    # Where NVRTC does not look beside itself for its builtins, it takes those that are loaded already.
    ctypes.CDLL(str(_library("libnvrtc-builtins.so")))
    nvrtc = ctypes.CDLL(str(_library("libnvrtc.so")))
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    assert status == 0, f"nvrtcCreateProgram gave {status}"
    flags = [b"--std=c++17", f"--gpu-architecture={architecture}".encode()]
    status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program) if status == 0 else ""
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Compiled(status, log, ptx)


def _text(size_of: Callable[..., int], text_of: Callable[..., int], program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    text_of(program, buffer)
    return buffer.value.decode()


def _library(name: str) -> Path:
    files = metadata.files("nvidia-cuda-nvrtc") or []
    found = [file for file in files if file.name.startswith(name)]
    return Path(str(found[0].locate()))
