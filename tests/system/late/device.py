"""`late`: a simulated device whose work is late (late.cpp), as a device of torch: `.to("late:1")`.

It is built with g++ when this is imported first, once for each version of torch, Python and its source.
ImportError says why it cannot be.  What it notes and what it can be told is in `core`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("late.cpp")
NAME = "late_core"


def _built() -> Path:
    """The library, built now if it is not there."""
    wanted = f"{torch.__version__} {sys.version} {SOURCE.read_text()}"
    folder = Path(tempfile.gettempdir()) / f"holdfast-late-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ImportError(f"{folder} belongs to another user")
    library = folder / f"{hashlib.sha256(wanted.encode()).hexdigest()[:16]}.so"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        raise ImportError("late needs g++, which is not here")
    unfinished = library.with_suffix(".unfinished")
    command = [
        *(
            compiler,
            "-shared",
            "-fPIC",
            "-std=c++17",
            "-O1",
            "-g0",
            "-w",
            f"-DTORCH_EXTENSION_NAME={NAME}",
        ),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()),
        f"-isystem{sysconfig.get_paths()['include']}",
        *(str(SOURCE), "-o", str(unfinished)),
        *(f"-L{path}" for path in cpp_extension.library_paths()),
        *("-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ImportError(
            f"late cannot be built with torch {torch.__version__}: {done.stderr[:2000]}"
        )
    unfinished.rename(library)


def _load() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, _built())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


torch.utils.rename_privateuse1_backend("late")
core = _load()


class _Late(types.ModuleType):
    """`torch.late`, as torch asks for it."""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 2

    current_device = staticmethod(core.get_device)

    @staticmethod
    def set_device(device: object) -> None:
        core.set_device(device if isinstance(device, int) else torch.device(str(device)).index)

    @staticmethod
    def _generator(device: Any = "late") -> torch.Generator:
        index = device if isinstance(device, int) else torch.device(device).index
        return core.generator(core.get_device() if index is None else index)

    @classmethod
    def manual_seed(cls, seed: int) -> None:
        cls._generator().manual_seed(seed)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        for index in range(cls.device_count()):
            cls._generator(index).manual_seed(seed)

    @classmethod
    def get_rng_state(cls, device: Any = "late") -> torch.Tensor:
        return cls._generator(device).get_state()

    @classmethod
    def set_rng_state(cls, state: torch.Tensor, device: Any = "late") -> None:
        cls._generator(device).set_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)


torch._register_device_module("late", _Late("torch.late"))
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
torch.empty(1, pin_memory=True)  # before that torch takes no memory for page-locked


class Graph:
    """The capture of a graph: what is called is done at once, and is no error where it would be one."""

    def capture_begin(self) -> None:
        core.begin_capture()

    def capture_end(self) -> None:
        voided_by = core.end_capture()
        if voided_by:
            raise RuntimeError(f"the capture was voided by {sorted(voided_by)}")


class _PageLocks:
    """How a test's host memory is page-locked, as `holdfast.live.state.devices.page_locks` has it."""

    def lock(self, address: int, size: int) -> str:
        core.host_register(address, size)
        return ""

    def unlock(self, address: int) -> None:
        core.host_unregister(address)


def lock_pages(can: bool) -> None:
    """Say whether host memory can be page-locked for it."""
    from holdfast.live.state import devices

    devices.page_locks.pop("late", None)
    if can:
        devices.page_locks["late"] = _PageLocks()


def follow_environment() -> None:
    """Set what `HOLDFAST_LATE` names, separated by commas: `pinned` (host memory can be page-locked),
    `strict` (no copy blocks that need not), `slow` (copies and kernels take long)."""
    named = {*filter(None, os.environ.get("HOLDFAST_LATE", "").split(","))}
    unknown = named - {"pinned", "strict", "slow"}
    assert not unknown, unknown
    core.kernel_us(500 if "slow" in named else 100)
    core.bytes_per_s(200_000_000 if "slow" in named else 0)
    core.all_is_pinned("strict" in named)
    lock_pages("pinned" in named)
