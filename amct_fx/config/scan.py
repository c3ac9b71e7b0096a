"""Find out where each field of a protobuf text file stands.

``text_format.Merge`` yields the values but forgets the places, and it does not tell of fields that
are given twice. :func:`scan` walks over the same tokens once more, by the same grammar, and returns
the file as a tree of :class:`Node`. It finds syntax errors and unknown fields, and says so better.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from amct_fx.config.schema import NOWHERE, Source
from amct_fx.errors import ConfigError, did_you_mean

__all__ = ["Node", "is_repeated", "scan"]

_CLOSING = {"{": "}", "<": ">"}
#: All strings are names; protobuf needs quadratic time for escapes in very long ones.
_MAX_STRING = 4096
_QUOTES = ("'", '"')
#: Characters and escapes as in C. Protobuf takes others too, by grace of a deprecated feature.
_STRING = re.compile(
    r"(?:[^\\]|\\(?:[abfnrtv\\'\"]|[0-3][0-7]{2}|[0-7]{1,2}(?![0-7])"
    r"|x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}))*",
    re.DOTALL,
)


@dataclass
class Node:
    """One occurrence of a field.

    Args:
        name: Name of the field; empty for the file as a whole.
        source: Place of the name.
        value: Place of the value, for scalars; of one element, in the short form ``[…]``.
        token: The value as it stands in the file, for scalars other than strings.
        descriptor: What protobuf knows about the field.
        children: The fields inside, for messages.
    """

    name: str
    source: Source
    value: Source = NOWHERE
    token: str = ""
    descriptor: Any = None
    children: list[Node] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """Yield this node and all nodes below it."""
        yield self
        for child in self.children:
            yield from child.walk()


def is_repeated(descriptor: Any) -> bool:
    """Tell whether a field is repeated, in the words of old and new protobuf."""
    if hasattr(descriptor, "is_repeated"):
        return bool(descriptor.is_repeated)
    return bool(descriptor.label == descriptor.LABEL_REPEATED)


def scan(text: str, descriptor: Any, file: str | None) -> Node:
    """Return the tree of a protobuf text file.

    Args:
        text: The file.
        descriptor: Descriptor of the root message.
        file: Name of the file, for messages.

    Raises:
        ConfigError: For a syntax error or an unknown field.
    """
    return _Scanner(text, file).root(descriptor)


class _Scanner:
    """A recursive-descent walk; it is as deep as the grammar, not as the file."""

    def __init__(self, text: str, file: str | None) -> None:
        from google.protobuf import text_format

        self._tokens: Any = text_format.Tokenizer(text.split("\n"))
        self._file = file

    def root(self, descriptor: Any) -> Node:
        """Scan the whole file."""
        root = Node("", Source(self._file))
        while not self._tokens.AtEnd():
            root.children.extend(self._field(descriptor, ""))
        return root

    def _field(self, parent: Any, inside: str) -> list[Node]:
        """Scan one field of the message ``parent``; several nodes for the short form."""
        name = self._name(parent, inside)
        source = self._consumed()
        descriptor = parent.fields_by_name[name]
        is_message = descriptor.message_type is not None
        if not self._tokens.TryConsume(":") and not is_message:
            message = f"expected ':' after {name}"
            raise self._error(message)
        nodes = []
        if is_repeated(descriptor) and self._tokens.TryConsume("["):
            more = not self._tokens.TryConsume("]")
            while more:
                nodes.append(self._value(Node(name, source, descriptor=descriptor)))
                more = not self._tokens.TryConsume("]")
                if more and not self._tokens.TryConsume(","):
                    message = "expected ',' or ']'"
                    raise self._error(message)
        else:
            nodes.append(self._value(Node(name, source, descriptor=descriptor)))
        if not self._tokens.TryConsume(","):
            self._tokens.TryConsume(";")
        return nodes

    def _name(self, parent: Any, inside: str) -> str:
        """Consume a field name that ``parent``, the message of the field ``inside``, has."""
        name = str(self._tokens.token)
        if not (name.isidentifier() or name.isalnum()):
            message = "expected a field name"
            raise self._error(message)
        if name not in parent.fields_by_name:
            choices = list(parent.fields_by_name)
            where = f" in {inside}" if inside else ""
            hint = did_you_mean(name, choices)
            message = f"unknown field {name!r}{where}{hint} (valid fields: {', '.join(choices)})"
            raise self._error(
                message,
                with_token=False,
            )
        self._tokens.NextToken()
        return name

    def _value(self, node: Node) -> Node:
        """Consume the value of a field."""
        if node.descriptor.message_type is not None:
            self._message(node)
        elif node.descriptor.cpp_type == node.descriptor.CPPTYPE_STRING:
            self._string(node)
        else:
            if self._tokens.AtEnd():
                message = f"the value of {node.name} is missing"
                raise self._error(message)
            node.token = str(self._tokens.token)
            self._tokens.NextToken()
            node.value = self._consumed()
        return node

    def _string(self, node: Node) -> None:
        """Consume a quoted string; neighbours make one string."""
        if self._tokens.token[:1] not in _QUOTES:
            message = f"{node.name} must be a quoted string"
            raise self._error(message)
        while (token := self._tokens.token)[:1] in _QUOTES:
            if len(token) > _MAX_STRING:
                message = f"{node.name} has more than {_MAX_STRING} characters"
                raise self._error(message, with_token=False)
            if len(token) < 2 or token[-1] != token[0]:
                message = f"the quote that closes the value of {node.name} is missing"
                raise self._error(message, with_token=False)
            if not _STRING.fullmatch(token[1:-1]):
                message = f"{node.name} has a backslash that begins no escape; write two"
                raise self._error(message, with_token=False)
            self._tokens.NextToken()
            node.value = node.value if node.value.line else self._consumed()

    def _message(self, node: Node) -> None:
        """Consume a message with its brackets."""
        closing = _CLOSING.get(self._tokens.token)
        if closing is None:
            message = f"expected '{{' after {node.name}"
            raise self._error(message)
        self._tokens.NextToken()
        while not self._tokens.TryConsume(closing):
            if self._tokens.AtEnd():
                message = f"the '{closing}' that closes {node.name} is missing"
                raise node.source.error(message)
            node.children.extend(self._field(node.descriptor.message_type, node.name))

    def _consumed(self) -> Source:
        """Return the place of the token that was consumed last."""
        place = self._tokens.ParseErrorPreviousToken("")
        return Source(self._file, place.GetLine(), place.GetColumn())

    def _error(self, message: str, *, with_token: bool = True) -> ConfigError:
        """Return the exception that says ``message`` about the current token."""
        token = self._tokens.token
        if with_token:
            message += f", found {token[:40]!r}" if token else ", found the end of the file"
        place = self._tokens.ParseError("")
        return Source(self._file, place.GetLine(), place.GetColumn()).error(message)
