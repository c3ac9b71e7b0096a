"""What every test shares: one thread, a fixed seed, and hypothesis without a deadline."""

from __future__ import annotations

import hypothesis
import pytest
import torch

# Tests work on small tensors, where more threads only wait for each other.
torch.set_num_threads(1)

# The first call of a torch operator can take a second; a deadline would only measure that.
hypothesis.settings.register_profile("amct_fx", deadline=None, print_blob=True)
hypothesis.settings.load_profile("amct_fx")

# The networks of the tests are tiny: a second thread only waits, and the golden runs were recorded
# with one.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start each test from the same random state."""
    torch.manual_seed(0)
