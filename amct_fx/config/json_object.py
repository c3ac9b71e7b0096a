"""JSON: the layout in which it is written, and objects whose values are checked when read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from amct_fx.errors import ConfigError, ConfigTypeError, did_you_mean

if TYPE_CHECKING:
    from amct_fx.config.schema import Source

__all__ = ["JsonObject", "Lines", "dump_json", "load_json"]


def dump_json(value: Mapping[str, Any]) -> str:
    """Return JSON in the layout of the tool: four blanks, no blank behind ``:``, no last newline.

    Example:
        >>> print(dump_json({"version": 1, "batch_num": 2}))
        {
            "version":1,
            "batch_num":2
        }
    """
    return json.dumps(value, indent=4, separators=(",", ":"))


def load_json(text: str, *, file: str | None = None) -> dict[str, Any]:
    """Return a JSON object in which no key stands twice.

    Raises:
        ConfigError: With line and column, when it is something else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in pairs:
            if key in result:
                message = f"the key {key!r} is given twice"
                raise ConfigError(message, file=file)
            result[key] = item
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        message = f"not JSON: {error.msg}"
        raise ConfigError(message, file=file, line=error.lineno, column=error.colno) from None
    except RecursionError:
        message = "the JSON is nested too deeply"
        raise ConfigError(message, file=file) from None
    except ConfigError:
        raise
    except ValueError as error:
        message = f"not JSON: {error}"
        raise ConfigError(message, file=file) from None
    if not isinstance(value, dict):
        message = f"a JSON configuration is an object, not a {type(value).__name__}"
        raise ConfigError(message, file=file)
    return value


class JsonObject:
    """A JSON object that checks the types of its values; messages say whose they are."""

    def __init__(
        self, value: Any, source: Source, owner: str, keys: tuple[str, ...] | None = None
    ) -> None:
        self.source = source
        self._owner = owner
        if not isinstance(value, Mapping):
            message = f"an object is expected, not {value!r:.40}"
            raise self._error(message)
        self._value = value
        for key in value:
            if keys is not None and key not in keys:
                hint = did_you_mean(str(key), keys)
                message = f"unknown key {key!r}{hint} (valid keys: {', '.join(keys)})"
                raise self._error(message)

    def typed(self, key: str, kind: type, default: Any) -> Any:
        """Return a value of exactly this type, or the default when the key is absent."""
        if key not in self._value:
            return default
        value = self._value[key]
        if type(value) is not kind:
            found = f"{type(value).__name__} ({value!r:.40})"
            message = f"{self._owner}{key} must be {kind.__name__}, not {found}"
            raise ConfigTypeError(message, file=self.source.file, line=self.source.line)
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> Any:
        """Return one of the choices, or the default when the key is absent."""
        value = self.typed(key, str, default)
        if value not in choices:
            hint = did_you_mean(value, choices)
            message = f"{key} must be {' or '.join(choices)}, not {value!r}{hint}"
            raise self._error(message)
        return value

    def object(self, key: str, keys: tuple[str, ...]) -> JsonObject | None:
        """Return the object inside, or ``None`` when the key is absent."""
        if key not in self._value:
            return None
        return JsonObject(self._value[key], self.source, f"{self._owner}{key}: ", keys)

    def build(self, make: Callable[[JsonObject], Any]) -> Any:
        """Make a dataclass; say where it stands when a value is out of range."""
        try:
            return make(self)
        except ConfigTypeError:
            raise
        except ConfigError as error:
            if error.message.startswith(self._owner):
                raise
            raise self._error(error.message) from None

    def _error(self, message: str) -> ConfigError:
        return self.source.error(f"{self._owner}{message}")


class Lines:
    """Find the lines of keys, one after the other, in one pass over the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._line = 1

    def find(self, key: str) -> int | None:
        """Return the line where a key stands next; the same word may be a value before."""
        for quoted in (json.dumps(key), json.dumps(key, ensure_ascii=False)):
            found = re.compile(rf"{re.escape(quoted)}\s*:").search(self._text, self._position)
            if found is not None:
                self._line += self._text.count("\n", self._position, found.start())
                self._position = found.start()
                return self._line
        return None
