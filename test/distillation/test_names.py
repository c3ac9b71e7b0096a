"""The function ``amct_fx.distill`` and the package around it do not share a name."""

from __future__ import annotations

import pkgutil
from types import ModuleType

import pytest

import amct_fx
from amct_fx import amct_pytorch


@pytest.mark.parametrize("package", [amct_fx, amct_pytorch])
def test_no_public_function_hides_a_module(package: ModuleType) -> None:
    for module in pkgutil.iter_modules(package.__path__):
        if module.name in vars(package):
            assert isinstance(vars(package)[module.name], ModuleType), module.name


def test_modules_of_the_package_can_be_imported_under_another_name() -> None:
    import amct_fx.distillation.groups as groups

    assert groups.find_groups is amct_fx.distillation.find_groups
    assert callable(amct_fx.distill)
    assert amct_fx.distill is amct_fx.distillation.distill
