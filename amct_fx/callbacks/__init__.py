"""Callbacks for training frameworks: ``callbacks.lightning`` and ``callbacks.transformers``.

Each module needs its framework, which is an extra of the same name; this package loads neither.
"""
