"""A checkpoint has the loaders of all ranks: what goes on from it has the bits of plain PyTorch."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

import hydra_ext
from hydra_ext import data
from hydra_ext.checkpoint import loader_states
from hydra_ext.errors import CheckpointMismatch, UnsupportedState
from support.data import checkpointed as bodies
from support.data import functions
from support.data.checkpointed import SAVED, STEPS, Piped, batches, dataset, model, plain, resumed, sgd, steps, weights
from support.ranks import run_ranks


def shuffled() -> data.Loader:
    return data.from_dataset(dataset(), batch_size=4, shuffle=True, num_workers=2, method="thread")


def stateful() -> Any:
    sampler = RandomSampler(dataset(), generator=torch.Generator().manual_seed(4))
    return StatefulDataLoader(dataset(), batch_size=4, sampler=sampler)


def pulled(keys: list[int]) -> tuple[torch.Tensor]:
    return (torch.stack([dataset()[key][0] for key in keys]),)


def torchdata() -> Any:
    node = nodes.Batcher(nodes.SamplerWrapper(SequentialSampler(dataset())), 4)
    return nodes.Loader(nodes.Prefetcher(nodes.Mapper(node, pulled), 2))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("make", [shuffled, stateful, torchdata])
def test_any_object_with_a_state_is_a_loader(make: Callable[[], Any], tmp_path: Path) -> None:
    expected = plain(make() if make is not shuffled else DataLoader(dataset(), batch_size=4, shuffle=True))
    assert all(map(torch.equal, resumed(make, tmp_path), expected))


def drawn(sample: Any) -> torch.Tensor:
    return torch.rand(2, generator=data.generator())


@pytest.mark.parametrize("samples", [functions.Drawn(12), functions.Stream(12)])
def test_the_epoch_behind_the_one_that_goes_on_has_the_generators_next_numbers(samples: Any) -> None:
    def make() -> data.Loader:
        made = torch.Generator().manual_seed(5)
        return data.from_dataset(samples, 4, map=drawn, method="thread", generator=made)

    with make() as loader:
        given = iter(loader)
        next(given)
        state = loader.state_dict()
        expected = [*given, *loader, *loader]
    with make() as loader:
        loader.load_state_dict(state)
        found = [*loader, *loader, *loader]
    assert len(found) == 2 + 3 + 3
    assert all(map(torch.equal, found, expected))


def ended_by_a_signal(folder: Path, taken: list[torch.Tensor]) -> None:
    trained = model()
    optimizer = sgd(trained.parameters())
    with shuffled() as loader, hydra_ext.offload(trained, optimizer, budget="1MiB") as run:
        run.save_on_sigterm(folder, loader=loader)
        for x in batches(loader, STEPS):
            taken.append(x)
            bodies.loss(trained, x).backward()
            if len(taken) == SAVED:
                signal.raise_signal(signal.SIGTERM)
            optimizer.step()
            optimizer.zero_grad()


def test_sigterm_saves_the_loader_as_the_step_left_it(tmp_path: Path) -> None:
    """The save comes when the loop has taken its next batch."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    expected = plain(DataLoader(dataset(), batch_size=4, shuffle=True))
    taken: list[torch.Tensor] = []
    try:
        with pytest.raises(SystemExit):
            ended_by_a_signal(tmp_path, taken)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(taken) == SAVED + 1
    trained = model()
    optimizer = sgd(trained.parameters())
    with shuffled() as loader, hydra_ext.offload(trained, optimizer, budget="1MiB") as run:
        assert run.load(tmp_path, loader=loader).step == SAVED
        steps(trained, optimizer, loader, STEPS - SAVED)
    assert all(map(torch.equal, weights(trained), expected))


def test_each_rank_goes_on_with_its_own_data(tmp_path: Path) -> None:
    expected = bodies.plain_of_two()
    for found, heard in run_ranks(bodies.run_of_two, tmp_path / "ckpt", folder=tmp_path):
        assert all(map(torch.equal, found, expected))
        assert heard.startswith("CheckpointMismatch")
        assert "loaders were saved by 2 ranks in 2 replicas, and none of their states is that of rank 0 of 1" in heard


def test_another_number_of_stages_goes_on_with_its_replicas_data(tmp_path: Path) -> None:
    assert run_ranks(bodies.save_pipelines, tmp_path, folder=tmp_path) == ["", ""]
    with Piped(stages=3) as piped, bodies.in_order() as loader:
        piped.pipe.load(tmp_path / "stages", loader=loader)
        piped.steps(batches(loader, STEPS - SAVED))
        assert all(map(torch.equal, piped.weights().values(), bodies.plain_pipeline()))
    with Piped(stages=2) as piped, bodies.in_order() as loader:
        before = piped.weights()
        with pytest.raises(CheckpointMismatch, match=r"2 replicas.*is that of rank 0 of 1 in 1 \(go on with"):
            piped.pipe.load(tmp_path / "replicas", loader=loader)
        assert all(map(torch.equal, piped.weights().values(), before.values()))
        assert piped.pipe.load(tmp_path / "replicas").step == SAVED  # the weights alone


class Odd:
    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state


def test_a_loader_that_was_not_saved_or_is_not_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained = model()
    with hydra_ext.offload(trained, sgd(trained.parameters()), budget="1MiB") as run, shuffled() as loader:
        run.save(tmp_path / "none")
        with pytest.raises(CheckpointMismatch, match="loader= is given, and none was saved"):
            run.load(tmp_path / "none", loader=loader)
        run.save(tmp_path / "one", loader=Odd({"at": 3, (1, 2): torch.arange(6.0).reshape(2, 3)[:, :0]}))
        with pytest.raises(CheckpointMismatch, match=r"loader= was '.*Odd', and is '.*Loader'"):
            run.load(tmp_path / "one", loader=loader)
        with caplog.at_level(logging.WARNING):
            run.load(tmp_path / "one")
        assert "no loader= is given: its data begin anew" in caplog.text
        odd = Odd(None)
        run.load(tmp_path / "one", loader=odd)
        assert list(odd.state_dict()) == ["at", (1, 2)]
        assert odd.state_dict()[1, 2].shape == (2, 0)
        for state, reason in (
            ([1], "not a dict"),
            ({"it": {1, 2}}, "'loader/it' is a set"),
            ({1: torch.ones(2), "1": torch.ones(2)}, "keys that are one text"),
        ):
            with pytest.raises(UnsupportedState, match=reason):
                run.save(tmp_path / "none", loader=Odd(state))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("had", "replicas", "now", "of_now", "warned"),
    [
        ((1, 1), 2, 2, 2, [0, 1]),
        ((1, 1), 2, 1, 1, [0]),  # another number of ranks
        ((1, 1), 2, 4, 4, [0, 1, 2, 3]),
        ((1, 0), 1, 2, 1, [0]),  # two stages, and the first one reads
        ((1, 0), 1, 3, 1, [0]),
        ((1, 1), 1, 3, 1, [0, 1, 2]),
        ((1, 1), 1, 3, 3, [0, 1, 2]),
        ((0, 1, 0, 0), 2, 4, 2, [1]),  # of one replica
        ((0, 1, 0, 0), 2, 2, 2, [1]),
        ((0, 0), 2, 4, 4, []),
    ],
)
def test_ranks_whose_data_begin_anew_are_warned(
    had: tuple[int, ...], replicas: int, now: int, of_now: int, warned: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    states = loader_states.joined(
        [loader_states.capture(Odd({"of": rank}) if has else None) for rank, has in enumerate(had)]
    )
    content = {"loaders": states, "ranks": [0] * len(had), "buffers": [{}] * replicas}
    reader: Any = SimpleNamespace(path=Path("ckpt"), manifest=SimpleNamespace(content=content))
    heard = []
    for rank in range(now):
        caplog.clear()
        saved = loader_states.SavedLoader(reader, None, rank=rank, ranks=now, replicas=of_now)
        assert not saved.differences
        saved.restore()
        heard += [rank] if "ckpt has the state of a loader" in caplog.text else []
    assert heard == warned


def test_an_empty_state_is_loaded_too(tmp_path: Path) -> None:
    trained = model()
    with hydra_ext.offload(trained, sgd(trained.parameters()), budget="1MiB") as run:
        run.save(tmp_path, loader=Odd({}))
        odd = Odd({"at": 5})
        run.load(tmp_path, loader=odd)
        assert odd.state_dict() == {}
        run.save(tmp_path, scaler=torch.amp.GradScaler("cpu", enabled=False))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        run.load(tmp_path, scaler=scaler)  # it refuses an empty state
        assert scaler.get_scale() == 4.0
