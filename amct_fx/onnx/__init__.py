"""ONNX files: the forms for onnxruntime and for Ascend, and a check of what was written.

Importing this package loads no ``onnx``.
"""

from amct_fx.onnx.export import export_onnx

__all__ = ["export_onnx"]
