"""A user's technique: plain steps, each of which is checked for numbers that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hydra_ext.fleet import Gang, Job, Session, Technique
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.techniques.plain import PlainSession


class Checked(Technique):
    name = "checked"

    def counts(self, devices: int) -> Sequence[int]:
        return [1]

    def search(self, job: Job, devices: Sequence[Device]) -> Mapping[str, Any]:
        return {"limit": 100.0}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Mapping[str, Any]) -> Iterator[Session]:
        with torch.autograd.set_detect_anomaly(True):
            yield PlainSession(job, gang.device, None)


class Faster(Checked):
    """Says that it is exact, and is not."""

    name = "faster"

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Mapping[str, Any]) -> Iterator[Session]:
        session = PlainSession(job, gang.device, None)
        session.optimizer.param_groups[0]["lr"] *= 3
        yield session
