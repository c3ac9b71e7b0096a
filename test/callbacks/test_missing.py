"""What is said where a framework is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from amct_fx import MissingExtraError


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_without_the_framework_the_callback_says_what_to_install(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"amct_fx.callbacks.{framework}"
    for module in [m for m in sys.modules if m.partition(".")[0] == framework]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, framework, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=rf"pip install 'amct-fx\[{framework}\]'"):
        module.QATCallback()
