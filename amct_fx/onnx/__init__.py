"""ONNX files: the forms for onnxruntime and for Ascend, and a check of what was written.

Importing this package loads no ``onnx``.
"""

from amct_fx.onnx.export import export_onnx
from amct_fx.onnx.verify import Verification, VerifiedLayer, verify_onnx

__all__ = ["Verification", "VerifiedLayer", "export_onnx", "verify_onnx"]
