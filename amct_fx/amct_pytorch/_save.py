"""Writing the files that AMCT's ``save`` functions write, all of them or none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import make_folder, replacing
from amct_fx.config.messages import warn
from amct_fx.record import record_message, record_text

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.amct_pytorch._arguments import SavePaths
    from amct_fx.config.record_pb2 import ScaleOffsetRecord
    from amct_fx.onnx.arguments import Format

__all__ = ["save_files"]


def save_files(
    converted: nn.Module,
    paths: SavePaths,
    input_data: Any,
    *,
    record_file: str | None = None,
    record: ScaleOffsetRecord | None = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:
    """Write the deploy file, the fake-quant file and the record file of a converted model.

    Each is made beside its place, and all are moved there at the end, so an error leaves the old
    ones.

    Args:
        converted: What :func:`amct_fx.convert_amct` returned.
        paths: The two ONNX files.
        input_data: A tensor or a tuple of the arguments of ``forward``.
        record_file: The record file, ``None`` for none.
        record: What it holds; ``None``: the quantized layers of the model.
        input_names: Names of the inputs in the files.
        output_names: Names of the outputs in the files.
        dynamic_axes: Axes whose length may change.

    Raises:
        ExportError: The model cannot be exported.
    """
    from amct_fx.onnx.export import export_onnx

    folder = paths.deploy.parent
    existing = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    with tempfile.TemporaryDirectory(dir=existing, prefix=".amct-fx-") as name:
        made = Path(name)
        formats: tuple[Format, Format] = ("ascend", "fake_quant")
        for path, kind in zip((paths.deploy, paths.fake_quant), formats, strict=True):
            export_onnx(
                converted,
                input_data,
                made / path.name,
                format=kind,
                input_names=input_names,
                output_names=output_names,
                dynamic_axes=dynamic_axes,
            )
        if record is None and record_file is not None:
            record = record_message(converted)
        with _written(record_file, record):
            _move(sorted(made.iterdir()), folder)


@contextmanager
def _written(path: str | None, record: ScaleOffsetRecord | None) -> Iterator[None]:
    """Write a record, if there is one, that takes its place when the body has succeeded."""
    if path is None or record is None:
        yield
        return
    with replacing(path) as file:
        file.write(record_text(record).encode())
        file.flush()
        os.fsync(file.fileno())  # a full disk shows now, before any file is replaced
        yield


def _move(files: Iterable[Path], folder: Path) -> None:
    """Give files their place; says before which older ones they replace."""
    targets = [(file, folder / file.name) for file in files]
    for _, target in targets:
        if target.exists():
            warn(f"{target} exists and is replaced")
    make_folder(folder)
    for file, target in targets:
        file.replace(target)
