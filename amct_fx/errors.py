"""The exceptions and the warning of amct_fx.

Every error the package raises on purpose is an :class:`AmctError` and, at the same time, the
built-in exception a caller would expect, so both of these work::

    except amct_fx.AmctError: ...
    except ValueError: ...

Messages say where (file:line:column, or the layer), what is wrong, and what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AmctError",
    "AmctFileNotFoundError",
    "AmctIsADirectoryError",
    "AmctNotADirectoryError",
    "AmctWarning",
    "ArgumentError",
    "ArgumentTypeError",
    "BackendError",
    "CalibrationError",
    "CheckpointError",
    "CheckpointKeyError",
    "ConfigError",
    "ConfigFileNotFoundError",
    "ConfigTypeError",
    "ConvertError",
    "DistillError",
    "ExportError",
    "InputDataError",
    "LayerNameError",
    "LayerTypeError",
    "MissingExtraError",
    "ModelError",
    "ModelStateError",
    "ModelTypeError",
    "PruneError",
    "RecordError",
    "RecordParseError",
    "did_you_mean",
    "first_line",
]


class AmctError(Exception):
    """Base of every exception that amct_fx raises on purpose."""


class AmctWarning(UserWarning):
    """Category of every warning that amct_fx issues."""


class ConfigError(AmctError, ValueError):
    """A configuration that cannot be read, or does not fit the model.

    Args:
        message: What is wrong and what to write instead.
        file: Path of the configuration file, or ``None`` when it came as text or objects.
        line: 1-based line, when known.
        column: 1-based column, when known.

    Example:
        >>> print(ConfigError("unknown field 'fixed_mn'", file="quant.cfg", line=3, column=5))
        quant.cfg:3:5: unknown field 'fixed_mn'
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        self.message = message
        self.file = file
        self.line = line
        self.column = column
        place = ":".join(str(part) for part in (file or "<config>", line, column) if part)
        super().__init__(f"{place}: {message}" if file or line else message)


class ConfigTypeError(ConfigError, TypeError):
    """A configuration value of the wrong Python type."""


class AmctFileNotFoundError(AmctError, FileNotFoundError):
    """A file to read does not exist."""


class AmctIsADirectoryError(AmctError, IsADirectoryError):
    """A folder stands where a file is to be written."""


class AmctNotADirectoryError(AmctError, NotADirectoryError):
    """A file stands where a folder is needed."""


class ConfigFileNotFoundError(AmctFileNotFoundError):
    """The configuration file does not exist."""


class ArgumentError(AmctError, ValueError, RuntimeError):
    """An argument of the right type that cannot be used; AMCT raises either of both classes."""


class ArgumentTypeError(AmctError, TypeError):
    """An argument of the wrong Python type; names the argument."""


class ModelError(AmctError, ValueError):
    """The model cannot be compressed as asked: nothing to quantize, non-finite weights."""


class PruneError(ModelError, RuntimeError):
    """A prune plan that does not fit the model, or a choice of channels that cannot be cut."""


class ModelTypeError(AmctError, TypeError):
    """Something that is not a ``torch.nn.Module`` was given as the model."""


class LayerTypeError(ModelTypeError, RuntimeError):
    """A layer of another class than the one asked for; AMCT raises either of both classes."""


class LayerNameError(AmctError, KeyError):
    """A name that no layer has."""

    __str__ = Exception.__str__  # that of KeyError would quote the message


class ModelStateError(AmctError, RuntimeError):
    """The model is in the wrong state for the call: already prepared, wrapped, not prepared."""


class InputDataError(AmctError, RuntimeError, TypeError):
    """Example inputs that are neither a tensor nor a tuple; AMCT raises either of both classes."""


class MissingExtraError(AmctError, ImportError):
    """An optional library is not installed; says which one, and what to install."""


class CalibrationError(AmctError, RuntimeError):
    """Calibration data from which no range can be found, such as NaN or Inf."""


class CheckpointError(AmctError, RuntimeError):
    """A checkpoint that cannot be read, or belongs to another model; names the first difference."""


class CheckpointKeyError(CheckpointError, KeyError):
    """A checkpoint that lacks something; names it."""

    __str__ = Exception.__str__  # that of KeyError would quote the message


class RecordError(AmctError, ValueError):
    """A record file whose values cannot be used; names the file and the layer."""


class RecordParseError(RecordError, RuntimeError):
    """A record file that is no protobuf text; names file, line and column."""


class BackendError(AmctError, RuntimeError):
    """A library that runs converted models is missing, or cannot be used here; says why."""


class DistillError(AmctError, RuntimeError):
    """A distillation that cannot go on: a block failed, or the disk is full; names the group."""


class ConvertError(AmctError, RuntimeError):
    """A prepared model that cannot become an integer model; names the layer."""


class ExportError(AmctError, RuntimeError):
    """A model that a file format cannot hold, or that no exporter can write; names the layer."""


def first_line(error: BaseException) -> str:
    r"""Return what an error says first, or its class where it says nothing.

    Example:
        >>> first_line(ValueError("wrong\nand much advice")), first_line(EOFError())
        ('wrong', 'EOFError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]


def did_you_mean(word: str, choices: Iterable[str], *, count: int = 3) -> str:
    """Return ``"; did you mean 'x' or 'y'?"`` for the closest choices, or ``""``.

    Example:
        >>> did_you_mean("fixed_mn", ["fixed_min", "dst_type"])
        "; did you mean 'fixed_min'?"
        >>> did_you_mean("zzz", ["fixed_min"])
        ''
    """
    matches = difflib.get_close_matches(word, list(choices), n=count, cutoff=0.6)
    if not matches:
        return ""
    return "; did you mean " + " or ".join(repr(match) for match in matches) + "?"
