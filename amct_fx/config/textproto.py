"""Read a protobuf text file into a message whose parts know where they were read.

The values come from ``google.protobuf.text_format.Merge``, which is what AMCT itself uses; the
places come from :mod:`amct_fx.config.scan`. Protobuf is imported when the first file is read.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from amct_fx.config.messages import warn
from amct_fx.config.scan import Node, is_repeated, scan
from amct_fx.config.schema import Source
from amct_fx.errors import ConfigError, did_you_mean

__all__ = ["Located", "read_message"]


class Located:
    """A message together with the places it was read from.

    Args:
        message: The protobuf message.
        nodes: The occurrences that were merged into it.
        owner: What it belongs to, such as ``"layer 'conv1'"``; empty for the file as a whole.
    """

    def __init__(self, message: Any, nodes: list[Node], owner: str = "") -> None:
        self.message = message
        self.owner = owner
        self._nodes = nodes

    @property
    def source(self) -> Source:
        """Place of the (last) occurrence."""
        return self._nodes[-1].source

    def child(self, name: str) -> Located | None:
        """Return a message field, or ``None`` when the file does not give it."""
        if not self.message.HasField(name):
            return None
        return Located(getattr(self.message, name), self._named(name), self.owner)

    def children(self, name: str) -> list[Located]:
        """Return the elements of a repeated message field."""
        pairs = zip(getattr(self.message, name), self._named(name), strict=True)
        return [Located(message, [node], self.owner) for message, node in pairs]

    def scalar(self, name: str) -> Any:
        """Return a scalar, or ``None`` when the file does not give it."""
        return getattr(self.message, name) if self.message.HasField(name) else None

    def strings(self, name: str) -> list[tuple[str, Source]]:
        """Return the elements of a repeated string field with their places."""
        pairs = zip(getattr(self.message, name), self._named(name), strict=True)
        return [(value, node.value) for value, node in pairs]

    def place(self, name: str) -> Source:
        """Return the place of the field's last value or name; of this message when not given."""
        nodes = self._named(name)
        return nodes[-1].source if nodes else self.source

    def required(self, name: str) -> Any:
        """Return a scalar that must be given."""
        value = self.scalar(name)
        if value is None:
            inside = f" in {self._nodes[-1].name}" if self._nodes[-1].name else ""
            message = f"{name} is missing{inside}"
            raise self.error(message)
        return value

    def required_member(self, oneof: str) -> Located:
        """Return the member of a oneof that must be given."""
        member = self.message.WhichOneof(oneof)
        if member is None:
            choices = [item.name for item in self.message.DESCRIPTOR.oneofs_by_name[oneof].fields]
            message = f"{' or '.join(choices)} is missing inside {self._nodes[-1].name}"
            raise self.error(message)
        child = self.child(member)
        assert child is not None
        return child

    def error(self, message: str, *, field: str = "") -> ConfigError:
        """Return the exception that says ``message`` about this message or one of its fields."""
        source = self.place(field) if field else self.source
        return source.error(f"{self.owner}: {message}" if self.owner else message)

    def _named(self, name: str) -> list[Node]:
        """Return the occurrences of a field."""
        return [child for node in self._nodes for child in node.children if child.name == name]


def read_message(
    text: str,
    message: Any,
    *,
    file: str | None = None,
    schema: Any = None,
    schema_name: str = "",
    keep_places: bool = True,
) -> Located:
    """Merge a protobuf text file into ``message``.

    Args:
        text: The file.
        message: An empty message of the grammar.
        file: Name of the file, for messages.
        schema: Descriptor of a smaller grammar; fields that it lacks are refused.
        schema_name: What to call the smaller grammar.
        keep_places: Remember the places; otherwise only the name of the file.

    Raises:
        ConfigError: When the file does not follow the grammar.
    """
    from google.protobuf import text_format

    _check_encoding(text, file)
    root = scan(text, message.DESCRIPTOR, file)
    if schema is not None:
        _refuse_unknown_to(schema, schema_name, root)
    try:
        text_format.Merge(text, message)
    except text_format.ParseError as error:
        raise _value_error(root, error, file) from None
    except (ValueError, TypeError, OverflowError) as error:
        raise Source(file).error(str(error)) from None
    for node in root.walk():
        if not keep_places:
            node.source = node.value = Source(file)
        _warn_of_repetitions(node)
    return Located(message, [root])


def _check_encoding(text: str, file: str | None) -> None:
    """Raise ConfigError for half a surrogate pair, which a Python string may hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        message = f"the character {text[error.start]!r} is not allowed"
        raise ConfigError(message, file=file, line=line) from None


def _refuse_unknown_to(schema: Any, schema_name: str, node: Node) -> None:
    """Raise ConfigError at the first field that the smaller grammar lacks."""
    for child in node.children:
        field = schema.fields_by_name.get(child.name)
        if field is None:
            inside = f" in {node.name}" if node.name else ""
            message = f"the {schema_name} dialect has no field {child.name!r}{inside}"
            raise child.source.error(message)
        if child.children:
            _refuse_unknown_to(field.message_type, schema_name, child)


def _value_error(root: Node, error: Any, file: str | None) -> ConfigError:
    """Return the exception for a value that protobuf refused."""
    place = (error.GetLine(), error.GetColumn())
    for node in root.walk():
        if node.descriptor is not None and (node.value.line, node.value.column) == place:
            return node.value.error(f"{node.name} must be {_expected(node)}")
    text = str(error).partition(" : ")[2] or str(error)
    return Source(file, *place).error(text)


def _expected(node: Node) -> str:
    """Describe the values that a scalar field takes, and the one it got."""
    descriptor = node.descriptor
    if descriptor.enum_type is not None:
        names = list(descriptor.enum_type.values_by_name)
        return f"one of {', '.join(names)}, not {node.token}{did_you_mean(node.token, names)}"
    kinds = {
        descriptor.CPPTYPE_BOOL: "true or false",
        descriptor.CPPTYPE_UINT32: "a whole number from 0 to 4294967295",
        descriptor.CPPTYPE_FLOAT: "a number such as 6.0",
    }
    expected = kinds.get(descriptor.cpp_type, "a value of another kind")
    return f"{expected}, not {node.token[:40]}"


def _warn_of_repetitions(node: Node) -> None:
    """Warn of fields and members of a oneof that are given more than once in one block."""
    by_name: dict[str, list[Node]] = defaultdict(list)
    by_oneof: dict[str, list[Node]] = defaultdict(list)
    for child in node.children:
        if not is_repeated(child.descriptor):
            by_name[child.name].append(child)
            if child.descriptor.containing_oneof is not None:
                by_oneof[child.descriptor.containing_oneof.name].append(child)
    for name, nodes in by_name.items():
        if len(nodes) > 1:
            is_message = nodes[0].descriptor.message_type is not None
            effect = "they are merged, later values win" if is_message else "the last one wins"
            warn(f"{nodes[-1].source}: {name} is given {len(nodes)} times; {effect}")
    for nodes in by_oneof.values():
        names = list(dict.fromkeys(node.name for node in nodes))
        if len(names) > 1:
            wins = nodes[-1]
            warn(f"{wins.source}: {' and '.join(names)} exclude each other; {wins.name} wins")
