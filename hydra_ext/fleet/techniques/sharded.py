"""torch's FSDP2 (``fully_shard``): each rank holds a part of every weight, and trains on its part of the batch.

A checkpoint goes through a whole copy of the model and its optimizer on every rank's host, as all techniques load it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hydra_ext.blocks import discover
from hydra_ext.fleet.devices import Device
from hydra_ext.fleet.job import Job
from hydra_ext.fleet.techniques import forecast
from hydra_ext.fleet.techniques.building import build_model, build_optimizer, build_schedule
from hydra_ext.fleet.techniques.interface import Configuration, Gang, Session, Technique, WontDo
from hydra_ext.fleet.techniques.offloading import SUMS_OF_SUMS, share_of
from hydra_ext.fleet.techniques.plain import PlainSession
from hydra_ext.optim.host_optimizer import HostOptimizer

_BLOCKS = 8  # a wrapped part has at most this part of the model, where modules allow it


class FullySharded(Technique):
    """Weights, gradients and optimizer state in parts, one on each device."""

    name = "fsdp"
    exact = False
    bound = SUMS_OF_SUMS

    def counts(self, devices: int) -> Sequence[int]:
        return range(2, devices + 1)

    def search(self, job: Job, devices: Sequence[Device]) -> Configuration:
        model, microbatches = forecast.first_step(job)
        if len(microbatches) % len(devices):
            raise WontDo(
                f"a step has {len(microbatches)} microbatches, which {len(devices)} ranks cannot share equally; the "
                "batch stays as it is"
            )
        if isinstance(build_optimizer(job, model.parameters()), HostOptimizer):
            raise WontDo("an optimizer of hydra_ext.optim needs whole weights on the host; torch's work on parts")
        weights = sum(parameter.nbytes for parameter in model.parameters())
        whole = forecast.plain_bytes(job)
        needed = whole - 2 * weights + 2 * -(-weights // len(devices)) + weights // _BLOCKS
        if needed > devices[0].budget:
            raise WontDo(
                f"parts of weights and gradients, one whole block and activations take {needed} bytes, and a device "
                f"has {devices[0].budget}",
                smallest_budget=needed,
            )
        return {}

    @contextmanager
    def open(self, job: Job, gang: Gang, configuration: Configuration) -> Iterator[Session]:
        mesh = init_device_mesh(gang.device.torch_device.type, (gang.ranks,))
        yield ShardedSession(job, gang, mesh)


class ShardedSession(Session):
    def __init__(self, job: Job, gang: Gang, mesh: DeviceMesh) -> None:
        self._job = job
        self._gang = gang
        self._mesh = mesh
        self.model = build_model(job).to(gang.device.torch_device)
        size = sum(parameter.nbytes for parameter in self.model.parameters())
        for block in discover(self.model, largest_bytes=size // _BLOCKS).blocks:
            module = self.model.get_submodule(block.name)
            if module is not self.model:
                fully_shard(module, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = build_optimizer(job, self.model.parameters())
        self.schedule = build_schedule(job, self.optimizer)

    def step(self, microbatches: Sequence[Any], seeds: Sequence[int]) -> float:
        own = share_of(microbatches, self._gang)
        losses = []
        for number, (microbatch, seed) in enumerate(zip(microbatches[own], seeds[own], strict=True), 1):
            torch.manual_seed(seed)
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(number == len(microbatches[own]))
            loss = self._job.loss(self.model, self._gang.device.moved(microbatch))
            (loss / len(microbatches[own])).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if self._job.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._job.max_norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        return self._gang.mean(torch.stack(losses))

    def evaluate(self, microbatches: Sequence[Any]) -> float:
        twin = self._twin()
        return twin.evaluate(microbatches)

    def save(self, folder: Path, extra: Any) -> None:
        twin = self._twin()  # all ranks gather
        if self._gang.rank == 0:
            twin.save(folder, extra)
        torch.distributed.barrier()

    def load(self, folder: Path) -> tuple[int, Any] | None:
        twin = PlainSession(self._job, self._gang.device, None)
        found = twin.load(folder)
        if found is None:
            return None
        for own, whole in self._pairs(twin):
            self._put(own, whole)
            for key, value in twin.optimizer.state.get(whole, {}).items():
                sharded = isinstance(value, Tensor) and value.shape == whole.shape and value.dim() > 0
                state = self._part(value, own) if sharded else value
                self.optimizer.state[own][key] = state
        for own_group, whole_group in zip(self.optimizer.param_groups, twin.optimizer.param_groups, strict=True):
            own_group.update({key: value for key, value in whole_group.items() if key != "params"})
        for own_buffer, whole_buffer in zip(self.model.buffers(), twin.model.buffers(), strict=True):
            own_buffer.copy_(whole_buffer)
        if self.schedule is not None and twin.schedule is not None:
            self.schedule.load_state_dict(twin.schedule.state_dict())
        return found

    @property
    def trained(self) -> Sequence[tuple[Optimizer, LRScheduler | None]]:
        return [(self.optimizer, self.schedule)]

    # ---- a whole copy -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _twin(self) -> PlainSession:
        """The whole training, as one process would have it."""
        twin = PlainSession(self._job, self._gang.device, None)
        for own, whole in self._pairs(twin):
            whole.copy_(_whole(own))
            for key, value in self.optimizer.state.get(own, {}).items():
                twin.optimizer.state[whole][key] = _whole(value) if isinstance(value, Tensor) else value
        for own_group, whole_group in zip(self.optimizer.param_groups, twin.optimizer.param_groups, strict=True):
            whole_group.update({key: value for key, value in own_group.items() if key != "params"})
        for own_buffer, whole_buffer in zip(self.model.buffers(), twin.model.buffers(), strict=True):
            whole_buffer.copy_(own_buffer)
        if self.schedule is not None and twin.schedule is not None:
            twin.schedule.load_state_dict(self.schedule.state_dict())
        return twin

    def _pairs(self, twin: PlainSession) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self.model.parameters(), twin.model.parameters(), strict=True)

    @torch.no_grad()
    def _put(self, own: nn.Parameter, whole: Tensor) -> None:
        own.copy_(self._part(whole, own))

    def _part(self, whole: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor):
            return whole.clone()
        return distribute_tensor(whole.detach(), self._mesh, like.placements)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
