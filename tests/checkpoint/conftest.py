"""What tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import hydra_ext
from support.checkpoint.checkpoints import small


@pytest.fixture
def run() -> Iterator[hydra_ext.Run]:
    """Of a model that is forgotten afterwards."""
    model = small()
    with hydra_ext.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1MiB") as run:
        yield run
