"""Make the reference pages that follow from the sources: one table per configuration message.

    python docs/generate.py           write docs/reference/configuration.md
    python docs/generate.py --check   compare it with proto/*.proto, write nothing

The texts are the comments of the ``.proto`` files. Needs ``grpcio-tools``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "configuration.md"
#: Schema: title of its part of the page, and what tells its headings from those of the others.
SCHEMAS = {
    "retrain": ("Training and pruning", ""),
    "distill": ("Distillation", " (distillation)"),
    "retrain_mindspore": ("The MindSpore dialect", " (MindSpore)"),
    "auto_prune": ("The search for prune ratios", " (search)"),
}
LABELS = {
    FieldDescriptorProto.LABEL_OPTIONAL: "optional",
    FieldDescriptorProto.LABEL_REQUIRED: "required",
    FieldDescriptorProto.LABEL_REPEATED: "repeated",
}
#: Numbers of the fields of descriptor.proto, from which the paths of comments are made.
MESSAGE, ENUM, FIELD, VALUE = 4, 5, 2, 2

INTRODUCTION = """\
# Configuration reference

Every message and field of the configuration files, made from `proto/*.proto` by
`docs/generate.py`. [Configuration](../configuration.md) explains how they act together. A `.cfg`
file holds the fields of the first message of its part.
"""


def parse(name: str) -> FileDescriptorProto:
    """Return the descriptor of one ``.proto`` file, with its comments."""
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors"
        command = ["protoc", "--include_source_info", f"-I{ROOT / 'proto'}"]
        if protoc.main([*command, f"--descriptor_set_out={target}", f"{name}.proto"]) != 0:
            message = f"protoc failed for {name}.proto"
            raise RuntimeError(message)
        return descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file[0]


class Comments:
    """The comments of a file, by the path of what they stand at."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._texts = {
            tuple(place.path): " ".join(
                f"{place.leading_comments} {place.trailing_comments}".split()
            )
            for place in file.source_code_info.location
        }

    def at(self, *path: int) -> str:
        """Return the comment in one line; empty without one."""
        return self._texts.get(path, "").replace("|", "\\|")


def type_of(field: FieldDescriptorProto, part: str) -> str:
    """Return the type of a field, with a link where this page describes it."""
    if field.type_name:
        name = field.type_name.rpartition(".")[2]
        return f"[{name}](#{slug(name + part)})"
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and Sphinx make it."""
    return heading.lower().replace(" ", "-").replace("(", "").replace(")", "")


def rule_of(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """Return how often a field may stand, and of which choice it is part."""
    if field.HasField("oneof_index"):
        return f"one of `{message.oneof_decl[field.oneof_index].name}`"
    return LABELS[field.label]


def message_lines(
    message: DescriptorProto,
    index: int,
    comments: Comments,
    part: str,
    about_types: dict[str, str],
) -> Iterator[str]:
    """Yield the lines of one message; ``about_types`` helps out where a field has no comment."""
    yield f"### {message.name}{part}"
    yield ""
    if text := comments.at(MESSAGE, index):
        yield from (text, "")
    if not message.field:
        yield from ("No fields.", "")
        return
    yield "| field | no. | rule | type | default | |"
    yield "|---|---|---|---|---|---|"
    for position, field in enumerate(message.field):
        default = f"`{field.default_value}`" if field.default_value else ""
        field_type = field.type_name.rpartition(".")[2]
        kind = type_of(field, part)
        text = comments.at(MESSAGE, index, FIELD, position) or about_types.get(field_type, "")
        yield (
            f"| `{field.name}` | {field.number} | {rule_of(field, message)} | {kind} "
            f"| {default} | {text} |"
        )
    yield ""


def schema_lines(name: str, title: str, part: str) -> Iterator[str]:
    """Yield the lines of one schema: its messages, then its enums."""
    file = parse(name)
    comments = Comments(file)
    yield from (f"## {title}", "", f"`proto/{name}.proto`", "")
    about_types = {
        message.name: comments.at(MESSAGE, index) for index, message in enumerate(file.message_type)
    }
    for index, message in enumerate(file.message_type):
        yield from message_lines(message, index, comments, part, about_types)
    for index, enum in enumerate(file.enum_type):
        yield from (f"### {enum.name}{part}", "")
        if text := comments.at(ENUM, index):
            yield from (text, "")
        yield ", ".join(f"`{value.name}` ({value.number})" for value in enum.value)
        yield ""


def render() -> str:
    """Return the text of the page."""
    lines = [INTRODUCTION]
    for name, (title, part) in SCHEMAS.items():
        lines += schema_lines(name, title, part)
    return "\n".join(lines).rstrip() + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the script; return the exit code."""
    parser = argparse.ArgumentParser(description="Make the generated pages of docs/reference.")
    parser.add_argument("--check", action="store_true", help="only compare, exit 1 when stale")
    if parser.parse_args(arguments).check:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == render()
        if not fresh:
            print(f"stale, run docs/generate.py: {PAGE.name}", file=sys.stderr)
        return 0 if fresh else 1
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
