"""Import the true torch-npu on a machine without Ascend's CANN, under generated stubs.

The shared objects of the wheel need C functions of the driver (acl*, rt*, prof*). One shared object
that defines each of them as "return 0", and empty ones with the names of CANN's libraries, let the
import succeed: no device, but every ``npu::`` schema and its original Meta kernel. Run it in a
process of its own. Source: spec/deploy.md section 8.5.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["WHEEL_FOLDER", "import_torch_npu", "why_not"]

WHEEL_FOLDER = "AMCT_FX_TORCH_NPU"
"""Environment variable: folder into which ``pip install --no-deps --target`` put torch-npu."""
_LIBRARIES = (
    "libhccl.so",
    "libascendcl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)


def wheel_folder() -> Path | None:
    """Return the folder of the package ``torch_npu``, which is found without importing it."""
    if WHEEL_FOLDER in os.environ:
        folder = Path(os.environ[WHEEL_FOLDER]) / "torch_npu"
        return folder if folder.is_dir() else None
    spec = importlib.util.find_spec("torch_npu")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def why_not() -> str | None:
    """Say what is missing for the stubs, ``None`` if nothing is."""
    if wheel_folder() is None:
        return f"torch-npu is not installed (pip install --no-deps --target; set {WHEEL_FOLDER})"
    tools = [tool for tool in ("cc", "nm") if shutil.which(tool) is None]
    return f"{' and '.join(tools)} not found" if tools else None


def import_torch_npu(scratch: Path) -> Any:
    """Build the stubs in ``scratch``, load them and import torch-npu."""
    folder = wheel_folder()
    assert folder is not None
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    import torch

    needed = _needed(folder, Path(torch.__file__).parent / "lib")
    for path in _compiled(needed, scratch):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    sys.path.append(str(folder.parent))
    return importlib.import_module("torch_npu")


def _needed(folder: Path, torch_libraries: Path) -> set[str]:
    """Return the functions that nothing on this machine defines."""
    own = [*folder.glob("_C*.so"), *(folder / "lib").glob("*.so")]
    maps = Path("/proc/self/maps").read_text().splitlines()
    system = {Path(line.split()[-1]) for line in maps if ".so" in line}
    others = [*torch_libraries.glob("*.so*"), *system, Path(sys.executable)]
    undefined = _symbols(own, "--undefined-only")
    return undefined - _symbols([*own, *others], "--defined-only")


def _symbols(files: Iterable[Path], which: str) -> set[str]:
    """Return the names of dynamic symbols, weak undefined ones left out, which may be absent."""
    found = set()
    for file in files:
        command = ["nm", "-D", which, "--format=posix", str(file)]
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for line in output.splitlines():
            name, kind = line.split()[:2]
            if which == "--defined-only" or kind == "U":
                found.add(name.partition("@")[0])
    return found


def _compiled(names: set[str], scratch: Path) -> list[Path]:
    """Compile the functions, and one empty library for each that CANN has."""
    source = scratch / "stub.c"
    plain = sorted(name for name in names if name.isidentifier() and not name.startswith("_Z"))
    source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in plain))
    empty = scratch / "empty.c"
    empty.write_text("")
    paths = [scratch / "libamct_fx_stub.so", *(scratch / name for name in _LIBRARIES)]
    for path in paths:
        text = source if path is paths[0] else empty
        command = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{path.name}", "-o", str(path)]
        subprocess.run([*command, str(text)], check=True)
    return paths
