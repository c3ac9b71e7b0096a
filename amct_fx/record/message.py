"""Record files as protobuf messages. Protobuf is imported when the first one is read or written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from amct_fx.config.files import replacing
from amct_fx.errors import AmctFileNotFoundError, RecordParseError
from amct_fx.record.layers import layer_records

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.config.record_pb2 import ScaleOffsetRecord

__all__ = [
    "read_record_message",
    "record_message",
    "record_text",
    "write_record",
    "write_record_message",
]


def write_record(path: str | os.PathLike[str], model: nn.Module) -> None:
    """Write the record file of a model.

    Args:
        path: The file; an older one is replaced.
        model: A prepared and calibrated model, or a converted one; it is not changed.

    Raises:
        ConvertError: The model cannot be converted; names the layer.
        ModelStateError: The model is not prepared.

    Example:
        >>> import tempfile
        >>> from amct_fx import prepare_qat_amct
        >>> from amct_fx.record import read_record, write_record
        >>> from torch import nn
        >>> cfg = "retrain_data_quant_config { ulq_quantize { clip_max_min { "
        >>> cfg += "clip_max: 2.0 clip_min: -0.5 } } }"
        >>> prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)), cfg)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_record(f"{folder}/record.txt", prepared)
        ...     record = read_record(f"{folder}/record.txt", prepared)
        >>> record["0"].scale_d, record["0"].offset_d
        (0.009803921915590763, -77)
    """
    write_record_message(path, record_message(model))


def record_message(model: nn.Module) -> ScaleOffsetRecord:
    """Return the record of a model as a protobuf message, which may be added to.

    Args:
        model: As for :func:`write_record`.
    """
    from amct_fx.config import record_pb2

    message = record_pb2.ScaleOffsetRecord()
    for record in layer_records(model).values():
        entry = message.record.add(key=record.name)
        value = entry.value
        value.scale_d, value.offset_d = record.scale_d, record.offset_d
        value.scale_w.extend(record.scale_w)
        value.offset_w.extend([0] * len(record.scale_w))
        value.act_type, value.wts_type = record.act_type, record.wts_type
        if record.fakequant_precision_mode is not None:
            value.fakequant_precision_mode = record.fakequant_precision_mode
        if record.scale_h is not None and record.offset_h is not None:
            value.scale_h, value.offset_h = record.scale_h, record.offset_h
            value.scale_r.extend(record.scale_r)
            value.offset_r.extend([0] * len(record.scale_r))
    return message


def write_record_message(path: str | os.PathLike[str], message: ScaleOffsetRecord) -> None:
    """Write a message as protobuf text: UTF-8, floats as short as their float32 allows.

    Args:
        path: The file; a crash leaves the old one.
        message: Layers, and what was pruned.
    """
    with replacing(path) as file:
        file.write(record_text(message).encode("utf-8"))


def record_text(message: ScaleOffsetRecord) -> str:
    """Return a message as protobuf text."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(message, as_utf8=True)
    return text


def read_record_message(path: str | os.PathLike[str]) -> ScaleOffsetRecord:
    """Read a record file into a protobuf message; a field given twice has its last value.

    Args:
        path: The file; an empty one gives an empty message.

    Raises:
        AmctFileNotFoundError: There is no such file.
        RecordParseError: It is no protobuf text of this grammar.
    """
    from google.protobuf import text_format

    from amct_fx.config import record_pb2

    record = record_pb2.ScaleOffsetRecord()
    name = os.fspath(path)
    try:
        text_format.Merge(Path(name).read_text(encoding="utf-8"), record)
    except FileNotFoundError:
        raise AmctFileNotFoundError(errno.ENOENT, "there is no such record file", name) from None
    except text_format.ParseError as error:
        message = f"{name}:{error}"  # the text of the error begins with line and column
        raise RecordParseError(message) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        message = f"{name}: the file cannot be read: {reason}"
        raise RecordParseError(message) from error
    return record
