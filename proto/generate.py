"""Make the modules ``amct_fx/config/*_pb2.py`` from the ``.proto`` files beside this script.

What protoc itself writes for Python is bound to the protobuf runtime it belongs to. These modules
hold nothing but the compiled descriptor and build their message classes with public calls, so they
load with every protobuf from 4.25 on. Each has a descriptor pool of its own: loading it cannot
collide with another package's messages.

    python proto/generate.py           write the modules
    python proto/generate.py --check   compare them with the .proto files, write nothing

Writing needs ``grpcio-tools``; ``--check`` compares hashes when it is not installed.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import sys
import tempfile
import textwrap
from pathlib import Path

PROTO_DIR = Path(__file__).resolve().parent
OUTPUT_DIR = PROTO_DIR.parent / "amct_fx" / "config"
PROTOS = ("retrain", "retrain_mindspore", "distill", "record", "auto_prune")

TEMPLATE = '''\
"""Message classes of ``proto/{name}.proto``; written by ``proto/generate.py``, do not edit."""

import base64
from typing import Any

from google.protobuf import descriptor_pool, message_factory

PROTO_SHA256 = "{sha256}"

_FILE = base64.b64decode("""
{literal}
""")

_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_FILE)


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{package}.{{name}}"))


{root}: Any = _message("{root}")
'''


def proto_sha256(name: str) -> str:
    """Return the hash of one ``.proto`` file, the same for every kind of line end."""
    text = (PROTO_DIR / f"{name}.proto").read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()


def have_protoc() -> bool:
    """Tell whether ``grpcio-tools``, which brings protoc, is installed."""
    return importlib.util.find_spec("grpc_tools") is not None


def compile_proto(name: str) -> bytes:
    """Return the serialized ``FileDescriptorProto`` of one ``.proto`` file."""
    from google.protobuf import descriptor_pb2
    from grpc_tools import protoc

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "descriptors"
        command = ["protoc", f"-I{PROTO_DIR}", f"--descriptor_set_out={target}", f"{name}.proto"]
        if protoc.main(command) != 0:
            message = f"protoc failed for {name}.proto"
            raise RuntimeError(message)
        files = descriptor_pb2.FileDescriptorSet.FromString(target.read_bytes()).file
    return files[0].SerializeToString(deterministic=True)


def render(name: str) -> str:
    """Return the source text of the module for one ``.proto`` file."""
    from google.protobuf import descriptor_pb2

    serialized = compile_proto(name)
    file = descriptor_pb2.FileDescriptorProto.FromString(serialized)
    literal = "\n".join(textwrap.wrap(base64.b64encode(serialized).decode(), 96))
    return TEMPLATE.format(
        name=name,
        sha256=proto_sha256(name),
        literal=literal,
        package=file.package,
        root=file.message_type[0].name,
    )


def stale() -> list[str]:
    """Return the names of the modules that do not fit their ``.proto`` file."""
    result = []
    for name in PROTOS:
        path = OUTPUT_DIR / f"{name}_pb2.py"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        fresh = text == render(name) if have_protoc() else proto_sha256(name) in text
        if not fresh:
            result.append(name)
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the script; return the exit code."""
    parser = argparse.ArgumentParser(description="Make amct_fx/config/*_pb2.py from proto/*.proto.")
    parser.add_argument("--check", action="store_true", help="only compare, exit 1 when stale")
    if parser.parse_args(argv).check:
        names = stale()
        if names:
            print("stale, run proto/generate.py:", ", ".join(names), file=sys.stderr)
        return 1 if names else 0
    for name in PROTOS:
        (OUTPUT_DIR / f"{name}_pb2.py").write_text(render(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
