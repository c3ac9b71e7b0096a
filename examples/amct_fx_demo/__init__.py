"""The demo behind ``amct-fx demo``: a small CNN on real images, from training to onnxruntime.

Read it in the order it runs: :mod:`.data`, :mod:`.network`, :mod:`.training`, :mod:`.deployment`,
and :mod:`.run`, which puts them together.
"""

from .network import DigitsNet
from .run import CONFIG, DemoResult, run_demo

__all__ = ["CONFIG", "DemoResult", "DigitsNet", "run_demo"]
