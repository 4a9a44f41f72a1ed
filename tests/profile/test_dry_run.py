"""A dry run says what a real microbatch takes, and leaves everything as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.profile import dry_run
from support.models.zoo import FAMILIES, Family
from support.models.zoo_more import MORE_FAMILIES
from support.profile.real_run import peaks, saved_by_modules

ALL = {**FAMILIES, **MORE_FAMILIES}


@pytest.mark.parametrize("name", ALL)
def test_saved_and_input_bytes_are_those_of_a_real_forward(name: str) -> None:
    family = ALL[name]
    model, batch = family.make(0), family.batches(1, 1)[0]
    profile = dry_run(model, batch, lambda mb: family.loss(model, mb))
    counted = saved_by_modules(model, batch, lambda mb: family.loss(model, mb))
    for module, figures in profile.modules.items():
        real = counted[module]
        assert figures.calls == real.calls, module
        assert figures.saved.fresh == sum(real.fresh.values()), module
        assert figures.saved.all == sum(real.saved.values()), module
        assert figures.inputs.fresh == sum(real.fresh_inputs.values()), module
        assert figures.inputs.all == sum(real.inputs.values()), module


@pytest.mark.parametrize("name", ALL)
def test_peaks_are_those_of_a_real_microbatch(name: str) -> None:
    family = ALL[name]
    model, batch = family.make(0), family.batches(1, 1)[0]
    profile = dry_run(model, batch, lambda mb: family.loss(model, mb))
    real = peaks(model, [batch], lambda mb: family.loss(model, mb))
    assert profile.modules[""].backward_bytes == pytest.approx(real.pop("backward"), rel=0.03)
    for module, most in real.items():
        assert profile.modules[module].forward_bytes == pytest.approx(most, rel=0.03), module
