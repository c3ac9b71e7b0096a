"""Loading the ``.pth`` files that AMCT's ``restore`` functions take."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amct_fx.amct_pytorch._amct_state import from_amct_state, is_amct_state
from amct_fx.amct_pytorch._arguments import check_type
from amct_fx.checkpoint import compare_states
from amct_fx.config.messages import listing
from amct_fx.errors import (
    AmctFileNotFoundError,
    ArgumentError,
    CheckpointError,
    CheckpointKeyError,
    did_you_mean,
    first_line,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_pth_arguments", "load_state", "read_state"]

_WRAPPER = "module."


def check_pth_arguments(pth_file: object, state_dict_name: object) -> None:
    """Refuse arguments of a wrong type, and a file that does not exist.

    Raises:
        ArgumentTypeError: Names the argument.
        AmctFileNotFoundError: There is no such file.
        ArgumentError: It is a folder.
    """
    check_type("pth_file", pth_file, str)
    check_type("state_dict_name", state_dict_name, str, optional=True)
    path = Path(str(pth_file))
    if path.is_dir():
        message = f"pth_file must name a file, not the folder {str(path)!r}"
        raise ArgumentError(message)
    if not path.exists():
        raise AmctFileNotFoundError(errno.ENOENT, "there is no such checkpoint", str(path))


def read_state(pth_file: str, state_dict_name: str | None = None) -> dict[str, Any]:
    """Read a state dict onto the CPU; nothing in the file is executed.

    Args:
        pth_file: What ``torch.save`` wrote: a state dict, or a dict that holds one.
        state_dict_name: Key of the state dict in the file; ``None`` when the file is one.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        AmctFileNotFoundError: There is no such file.
        CheckpointError: It holds no state dict.
        CheckpointKeyError: The file has no ``state_dict_name``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"net": torch.nn.Linear(2, 1).state_dict()}, f"{folder}/a.pth")
        ...     sorted(read_state(f"{folder}/a.pth", "net"))
        ['bias', 'weight']
    """
    check_pth_arguments(pth_file, state_dict_name)
    content = _load(pth_file)
    if state_dict_name is not None:
        if not isinstance(content, Mapping) or state_dict_name not in content:
            keys = [str(key) for key in content] if isinstance(content, Mapping) else []
            message = f"{pth_file} has no {state_dict_name!r}; it holds {listing(keys, limit=5)}"
            raise CheckpointKeyError(message + did_you_mean(state_dict_name, keys))
        content = content[state_dict_name]
    if not _is_state_dict(content):
        raise CheckpointError(_what_it_holds(pth_file, content, state_dict_name))
    return dict(content)


def load_state(model: nn.Module, state: Mapping[str, Any], pth_file: str) -> None:
    """Load a state dict, all of it; the model is as before after an error.

    The prefix ``module.`` of ``DistributedDataParallel`` is added or taken away if one side only
    has it. A checkpoint that AMCT made of the same model is translated.

    Args:
        model: The prepared model.
        state: What :func:`read_state` returned.
        pth_file: Name of its file, for messages.

    Raises:
        CheckpointKeyError: It lacks parameters or buffers of the model; lists them.
        CheckpointError: It has others, or other shapes; lists them.
    """
    expected = model.state_dict()
    found = _with_prefix_of(expected, state)
    if is_amct_state(found):
        found = from_amct_state(found, model)
    compare_states(expected, found, pth_file)
    model.load_state_dict(found)


def _load(pth_file: str) -> Any:
    try:
        return torch.load(pth_file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling foreign bytes raises many classes
        reason = first_line(error)
        message = (
            f"{pth_file} cannot be read as a checkpoint of tensors: {reason}; "
            "save model.state_dict() with torch.save"
        )
        raise CheckpointError(message) from error


def _is_state_dict(content: object) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(key, str) for key in content)
        and any(isinstance(value, torch.Tensor) for value in content.values())
    )


def _what_it_holds(pth_file: str, content: object, state_dict_name: str | None) -> str:
    """Say what stands in the place of a state dict, and which key holds one."""
    where = pth_file if state_dict_name is None else f"{state_dict_name!r} in {pth_file}"
    names = []
    if isinstance(content, Mapping):
        names = [str(key) for key, value in content.items() if _is_state_dict(value)]
    hint = f"; pass state_dict_name={names[0]!r}" if names else ""
    return f"{where} is no state dict but a {type(content).__name__}{hint}"


def _with_prefix_of(expected: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the prefix of ``DistributedDataParallel`` if ``expected`` has it."""
    ours, theirs = _is_wrapped(expected), _is_wrapped(state)
    if ours and not theirs:
        return {_WRAPPER + key: value for key, value in state.items()}
    if theirs and not ours:
        return {key.removeprefix(_WRAPPER): value for key, value in state.items()}
    return dict(state)


def _is_wrapped(state: Mapping[str, Any]) -> bool:
    return bool(state) and all(key.startswith(_WRAPPER) for key in state)
