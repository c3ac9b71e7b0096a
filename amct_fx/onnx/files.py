"""Writing a model: in one piece and at once, large tensors beside it.

Source: spec/deploy.md section 4, "External data".
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from onnx.external_data_helper import set_external_data

from amct_fx.config.files import replacing

if TYPE_CHECKING:
    import os
    from typing import IO

    from onnx import ModelProto, TensorProto

__all__ = ["MAX_BYTES", "write_model"]

MAX_BYTES = 2_000_000_000
"""A protobuf message must stay below 2 GiB."""


def write_model(
    model: ModelProto,
    path: str | os.PathLike[str],
    *,
    suffix: str,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Write a model and, while it is too large for one file, its largest tensors beside it.

    Nothing takes its final name before everything is written; the model does so last.

    Args:
        model: Its large tensors lose their data.
        path: The file to write.
        suffix: Ending of the names of the tensors' files, ``<tensor>_<suffix>.external``.
        max_bytes: Size of the largest single file that is allowed.
    """
    target = Path(path)
    with ExitStack() as stack:
        # Entered first, so it is the last to be renamed.
        file = stack.enter_context(replacing(target))
        size, taken = _size(model), set[str]()
        for tensor in _by_size(model):
            if size < max_bytes:
                break
            name = f"{_file_name(tensor.name, taken)}_{suffix}.external"
            size -= _move_out(tensor, name, stack.enter_context(replacing(target.parent / name)))
        file.write(model.SerializeToString())


def _size(model: ModelProto) -> int:
    """Return how many bytes the model takes; near 2 GiB, where protobuf cannot say so, about."""
    data = sum(len(item.raw_data) for item in model.graph.initializer)
    if data < 2**30:
        return model.ByteSize()
    return data + sum(part.ByteSize() + 8 for part in model.graph.node)


def _by_size(model: ModelProto) -> list[TensorProto]:
    """Return the tensors that can be stored outside, largest first."""
    tensors = [item for item in model.graph.initializer if item.raw_data]
    return sorted(tensors, key=lambda item: len(item.raw_data), reverse=True)


def _move_out(tensor: TensorProto, name: str, file: IO[bytes]) -> int:
    """Write the data of a tensor into a file of its own and return how many bytes these are."""
    data = tensor.raw_data
    file.write(data)
    set_external_data(tensor, location=name, offset=0, length=len(data))
    tensor.ClearField("raw_data")
    return len(data)


def _file_name(tensor: str, taken: set[str]) -> str:
    """Return a tensor's name without what cannot stand in the name of a file, not ``taken``."""
    start = name = re.sub(r"[^\w.\-]", "_", tensor)[:200]
    while name in taken:
        name = f"{start}_{len(taken)}"
    taken.add(name)
    return name
