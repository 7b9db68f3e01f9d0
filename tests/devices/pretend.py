"""A device that pretends to be an accelerator: `pretend.cpp`, built once per machine and known to torch as "pretend".

Loading it changes torch for the whole process, so tests start processes of their own (`processes.py`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("pretend.cpp")
COMPILER = shutil.which("g++")


def built() -> Path:
    """The library, in a cache folder outside of the repository; built if it is not there."""
    where = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secateur"
    told = SOURCE.read_bytes() + torch.__version__.encode()
    library = where / f"pretend-{hashlib.sha256(told).hexdigest()[:16]}.so"
    where.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            home = Path(torch.__file__).parent
            include = [f"-isystem{home / 'include'}", f"-isystem{home / 'include/torch/csrc/api/include'}"]
            link = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
            part = library.with_suffix(".part")
            options = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w"]
            subprocess.run([COMPILER or "g++", *options, *include, str(SOURCE), *link, "-o", str(part)], check=True)
            part.replace(library)
    return library


class Module(types.ModuleType):
    """What torch asks a device's module for."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.set_rng_state(torch.Generator().manual_seed(seed).get_state())

    def get_rng_state(self, _device: object = None) -> Tensor:
        return torch.ops.pretend.random_state()

    def set_rng_state(self, state: Tensor, _device: object = None) -> None:
        torch.ops.pretend.set_random_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def load() -> torch.device:
    """The device."""
    torch.ops.load_library(str(built()))
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", Module("torch.pretend"))
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("pretend", 0)


class Counted:
    waits = kernels = 0


@contextmanager
def counted() -> Iterator[Counted]:
    """How often the host waited for the device meanwhile, and how many kernels were launched."""
    found, library = Counted(), ctypes.CDLL(str(built()))
    before = library.pretend_waits(), library.pretend_kernels()
    yield found
    found.waits, found.kernels = library.pretend_waits() - before[0], library.pretend_kernels() - before[1]
