"""Random networks: what the plan cuts, the masked network cannot see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amct_fx.prune.oracles import column_mask_oracle
from test.prune.helpers import plan_for
from test.prune.random_graphs import SIDE, RandomNet, random_nets

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


NORM_AXIS = st.sampled_from(["pin", "mask_aware"])


def check(net: RandomNet, mode: str, ratio: float, norm_axis: str = "pin") -> None:
    torch.manual_seed(0)
    net.double().eval()
    for parameter in net.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5)
    example = torch.randn(2, 4, SIDE, SIDE, dtype=torch.float64)
    plan = plan_for(net, example, mode=mode, ratio=ratio, norm_axis=norm_axis)
    for train in (False, True):
        found = column_mask_oracle(net, plan, example, train=train, rows=train)
        assert found.worst < 1e-8, (found, str(plan))


@settings(max_examples=300, suppress_health_check=QUIET)
@given(random_nets(), st.sampled_from([0.3, 0.5, 0.7]), NORM_AXIS)
def test_native_mode_is_exact(net: RandomNet, ratio: float, norm_axis: str) -> None:
    check(net, "native", ratio, norm_axis)


@settings(max_examples=60, suppress_health_check=QUIET)
@given(random_nets())
def test_mode_amct_is_exact(net: RandomNet) -> None:
    check(net, "amct", 0.5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=3000, suppress_health_check=QUIET)
@given(random_nets(), st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9]), NORM_AXIS)
def test_native_mode_is_exact_on_many_more(net: RandomNet, ratio: float, norm_axis: str) -> None:
    check(net, "native", ratio, norm_axis)
