"""Trainings that save and load with their loaders, in one process and in ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hydra_ext
from hydra_ext import data
from hydra_ext.errors import HydraError

WIDTH = 16
STEPS = 9  # of 5 batches an epoch
SAVED = 3  # steps before the save: in the middle of an epoch


def dataset() -> TensorDataset:
    return TensorDataset(torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(1)))


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def loss(trained: nn.Module, x: Tensor) -> Tensor:
    return trained(x).square().mean()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def weights(trained: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trained.parameters()]


def batches(loader: Iterable[Any], count: int) -> Iterator[Tensor]:
    """So many batches, in as many epochs as that takes."""
    return (x for (x,) in islice(chain.from_iterable(repeat(loader)), count))


def plain(loader: Iterable[Any], parts: int = 1) -> list[Tensor]:
    """Plain PyTorch. A batch is cut into so many microbatches."""
    trained = model()
    optimizer = sgd(trained.parameters())
    for x in batches(loader, STEPS):
        for part in x.chunk(parts):
            (loss(trained, part) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(trained)


def steps(trained: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Any], count: int) -> None:
    for x in batches(loader, count):
        loss(trained, x).backward()
        optimizer.step()
        optimizer.zero_grad()


def resumed(make: Callable[[], Any], folder: Path, **options: Any) -> list[Tensor]:
    """The weights of a run that was saved in the middle of an epoch, and has gone on from there."""
    for first, last in ((0, SAVED), (SAVED, STEPS)):
        trained, loader = model(), make()
        optimizer = sgd(trained.parameters())
        with hydra_ext.offload(trained, optimizer, budget="1MiB", **options) as run:
            if first:
                torch.rand(last)  # another process would have other numbers
                run.load(folder, loader=loader)
            steps(trained, optimizer, loader, last - first)
            if last < STEPS:
                run.save(folder, loader=loader)
        if isinstance(loader, data.Loader):
            loader.close()
    return weights(trained)


def heard(work: Callable[[], Any]) -> str:
    """An error's name and message; empty without one."""
    try:
        work()
    except HydraError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- ranks ----------------------------------------------------------------------------------------------------------


def sampler(rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(dataset(), num_replicas=2, rank=rank, shuffle=True, seed=5)


def of_rank(rank: int) -> data.Loader:
    return data.from_dataset(dataset(), batch_size=2, sampler=sampler(rank), method="thread", num_workers=2)


def run_of_two(rank: int, folder: Path) -> tuple[list[Tensor], str]:
    """The weights of a run that has gone on, and what is heard if one rank alone goes on."""
    found = resumed(lambda: of_rank(rank), folder)
    alone = model()
    with hydra_ext.offload(alone, sgd(alone.parameters()), budget="1MiB", process_group=False) as run:
        return found, heard(lambda: run.load(folder, loader=of_rank(rank)))


def plain_of_two() -> list[Tensor]:
    """Two ranks in one: gradients are the means of the ranks'."""
    trained = model()
    optimizer = sgd(trained.parameters())
    loaders = [DataLoader(dataset(), batch_size=2, sampler=sampler(rank)) for rank in range(2)]
    for pair in zip(*(batches(loader, STEPS) for loader in loaders), strict=True):
        for x in pair:
            (loss(trained, x) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(trained)


# ---- pipelines ------------------------------------------------------------------------------------------------------


def in_order() -> data.Loader:
    """Of all ranks of a replica."""
    made = torch.Generator().manual_seed(9)
    return data.from_dataset(dataset(), batch_size=4, shuffle=True, generator=made, method="thread", num_workers=2)


def plain_pipeline() -> list[Tensor]:
    return plain(DataLoader(dataset(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(9)), 2)


class Piped:
    """A pipeline, whose microbatches are the halves of a loader's batches."""

    def __init__(self, **options: Any) -> None:
        self.model = model()
        self.pipe = hydra_ext.Pipeline(self.model, sgd, schedule="gpipe", microbatches=2, seed=0, **options)

    def __enter__(self) -> Piped:
        self.pipe.prepare(torch.ones(2, WIDTH), lambda x: loss(self.model, x))
        return self

    def __exit__(self, *error: Any) -> None:
        self.pipe.__exit__(*error)

    def steps(self, given: Iterable[Tensor]) -> None:
        for x in given:
            self.pipe.step(x, lambda each: loss(self.model, each))

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.pipe.state_dict().items()}


def save_pipelines(rank: int, folder: Path) -> str:
    """Saves one of two stages, whose ranks read the same data, and one of two replicas, whose ranks do not."""
    with Piped(stages=2) as piped, in_order() as loader:
        piped.steps(batches(loader, SAVED))
        piped.pipe.save(folder / "stages", loader=loader)
    with Piped(replicas=2) as piped, of_rank(rank) as loader:
        given = batches(loader, STEPS)
        piped.steps(islice(given, SAVED))
        piped.pipe.save(folder / "replicas", loader=loader)
        expected = next(given)
    with Piped(replicas=2) as piped, of_rank(rank) as loader:
        piped.pipe.load(folder / "replicas", loader=loader)
        return "" if torch.equal(next(batches(loader, 1)), expected) else "another replica's data"
