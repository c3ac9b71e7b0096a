"""Message classes of ``proto/auto_prune.proto``; written by ``proto/generate.py``, do not edit."""

import base64
from typing import Any

from google.protobuf import descriptor_pool, message_factory

PROTO_SHA256 = "f1e69bc4fccd1e7390ac906f7a266ce1ece81d2fe37f5661a063549a2afd4185"

_FILE = base64.b64decode("""
ChBhdXRvX3BydW5lLnByb3RvEhJhbWN0X2Z4LmF1dG9fcHJ1bmUi8wEKFkF1dG9DaGFubmVsUHJ1bmVDb25maWcSJQoOY29t
cHJlc3NfcmF0aW8YASACKAJSDWNvbXByZXNzUmF0aW8SLwoQYXNjZW5kX29wdGltaXplZBgCIAEoCDoEdHJ1ZVIPYXNjZW5k
T3B0aW1pemVkEikKD21heF9wcnVuZV9yYXRpbxgDIAEoAjoBMVINbWF4UHJ1bmVSYXRpbxIoCg50ZXN0X2l0ZXJhdGlvbhgE
IAEoDToBMVINdGVzdEl0ZXJhdGlvbhIsChJvdmVycmlkZV9wcnVuZV9jZmcYBSABKAlSEG92ZXJyaWRlUHJ1bmVDZmc=
""")

_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(_FILE)


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"amct_fx.auto_prune.{name}"))


AutoChannelPruneConfig: Any = _message("AutoChannelPruneConfig")
