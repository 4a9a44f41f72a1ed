"""Batches that are on the GPU before they are asked for: what is in them, and how long their memory stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydra_ext
from hydra_ext import data
from support.data.feeds import SAMPLES, Recycled, Unlimited, batch_of, tensors_in

DEVICE = torch.device("cuda", 0)


def test_a_training_has_the_bits_of_one_that_copies_by_itself() -> None:
    """Its batches take room ahead that its blocks need."""
    made = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.randn(512, 1024, generator=made), torch.randint(0, 4, (512,), generator=made))

    def model() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(8)), nn.Linear(1024, 4))

    def train(trained: nn.Module, optimizer: Any, batches: Any) -> list[torch.Tensor]:
        for x, target in batches:
            nn.functional.cross_entropy(trained(x.to(DEVICE)), target.to(DEVICE)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu().clone() for parameter in trained.parameters()]

    plain = model().to(DEVICE)
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), DataLoader(dataset, batch_size=128))
    del plain
    ours = model()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with (
        hydra_ext.offload(ours, optimizer, budget="40MiB", device=DEVICE) as run,
        data.from_dataset(dataset, batch_size=128, method="thread", device=run.device) as loader,
    ):
        assert all(each.device == DEVICE for batch in loader for each in batch)
        found = train(ours, optimizer, loader)
        assert run.report().evictions > 0
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_source_may_write_to_what_it_gave_before(pinned: bool) -> None:
    """As workers do whose memory is used again. The batches wait on the device, each with its own numbers."""
    source = Recycled(pinned=pinned)
    node = data.ToDevice(source, DEVICE, depth=SAMPLES)

    def late() -> None:
        with torch.cuda.stream(node._stream):
            torch.cuda._sleep(2_000_000)  # cycles

    source.before = late
    with data.Loader(node) as loader:
        found = list(loader)
    assert len(found) == SAMPLES
    for number, batch in enumerate(found):
        for tensor, expected in zip(tensors_in(batch), tensors_in(batch_of(number)), strict=True):
            assert tensor.device == DEVICE
            assert torch.equal(tensor.cpu(), expected)
            assert tensor.stride() == expected.to(DEVICE).stride()


def test_memory_of_a_batch_is_not_used_again_while_the_stream_that_took_it_reads_it() -> None:
    side = torch.cuda.Stream()
    with data.Loader(data.ToDevice(Unlimited(2**20), DEVICE, depth=1)) as loader, torch.cuda.stream(side):
        batches = iter(loader)
        sums = []
        for _ in range(6):
            batch = next(batches)
            torch.cuda._sleep(2_000_000)  # cycles
            sums.append(batch.sum())
            del batch
        assert [each.item() for each in sums] == [2**20 * number for number in range(6)]


def test_batches_that_wait_are_as_many_as_the_depth() -> None:
    size = 2**20
    before = torch.cuda.memory_allocated()
    node = data.ToDevice(Unlimited(size), DEVICE, depth=3)
    torch.cuda.reset_peak_memory_stats()
    with data.Loader(node) as loader:
        batches = iter(loader)
        for number in range(8):
            assert next(batches)[0].item() == number
        assert torch.cuda.max_memory_allocated() - before <= (3 + 1) * 4 * size


def test_what_does_not_fit_is_given_as_it_is() -> None:
    model = nn.Linear(8, 8)
    with hydra_ext.offload(model, budget="64MiB", device=DEVICE) as run:
        with data.Loader(data.ToDevice(Unlimited(2**25), run.device, depth=1)) as loader:  # 128 MiB
            batch = next(iter(loader))
            assert batch.device.type == "cpu"
        with data.Loader(data.ToDevice(Unlimited(2**10), run.device, depth=1)) as loader:
            assert next(iter(loader)).device == DEVICE
