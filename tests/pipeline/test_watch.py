"""What a rank's watch knows of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from hydra_ext.pipeline.ranks.watch import Watch

PATIENCE = 3600.0  # seconds that no test may need


@pytest.fixture
def watch() -> Iterator[Watch]:
    """That of the first of two ranks; the second has never come."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = Watch(0, 2, "alone", patience=PATIENCE, describe=lambda: "here")
    yield found
    found.end()
    dist.destroy_process_group()


def test_a_rank_that_never_gave_a_sign_is_not_waited_for(watch: Watch) -> None:
    seen = []
    asking = threading.Thread(target=lambda: seen.append(watch.last_seen(1)), daemon=True)
    asking.start()
    asking.join(300.0)
    assert seen == [""]
