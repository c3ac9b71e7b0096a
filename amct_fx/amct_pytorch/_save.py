"""Writing the files that AMCT's ``save`` functions write, all of them or none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import make_folder
from amct_fx.config.messages import warn
from amct_fx.record import write_record

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.amct_pytorch._arguments import SavePaths
    from amct_fx.onnx.arguments import Format

__all__ = ["save_files"]


def save_files(
    converted: nn.Module,
    paths: SavePaths,
    input_data: Any,
    *,
    record_file: str | None = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:
    """Write the deploy file, the fake-quant file and the record file of a converted model.

    Both ONNX files are made in a folder beside their place and moved there at the end, so an error
    leaves the old ones.

    Args:
        converted: What :func:`amct_fx.convert_amct` returned.
        paths: The two ONNX files.
        input_data: A tensor or a tuple of the arguments of ``forward``.
        record_file: The record file, ``None`` for none.
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
        if record_file is not None:
            write_record(record_file, converted)
        make_folder(folder)
        _move(sorted(made.iterdir()), folder)


def _move(files: Iterable[Path], folder: Path) -> None:
    """Give files their place; says which older ones they replace."""
    for file in files:
        target = folder / file.name
        if target.exists():
            warn(f"{target} exists and is replaced")
        file.replace(target)
