"""``ToDevice`` where there is no GPU, and what it makes of a batch. tests/cuda/test_data.py has its copies."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import hydra_ext
from hydra_ext import SimulatedDevice, data
from hydra_ext.data.stages import to_device
from hydra_ext.errors import InvalidArgument
from support.data.checkpointed import STEPS, dataset, model, plain, sgd, steps, weights
from support.data.feeds import Recycled, Unlimited, batch_of, tensors_in


def test_tensors_are_replaced_wherever_they_are() -> None:
    batch, expected = batch_of(1), [tensor + 1 for tensor in tensors_in(batch_of(1))]
    found = tensors_in(to_device._replaced(batch, lambda tensor: tensor + 1))
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, tensors_in(batch), tensors_in(batch_of(1)))), "the batch itself stays"


def test_what_has_no_tensors_stays_the_same_object() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"tensor": torch.ones(1), "rest": [1, ("text", {2})], "type": SimulatedDevice, "packed": packed}
    found = to_device._replaced(batch, lambda tensor: tensor + 1)
    assert found is not batch
    assert all(found[key] is batch[key] for key in ("rest", "type", "packed"))
    assert to_device._replaced(batch["rest"], lambda tensor: tensor + 1) is batch["rest"]


def test_nothing_is_copied_on_the_host() -> None:
    source = Recycled()
    with data.Loader(data.ToDevice(source, "cpu")) as loader:
        assert all(batch is source._batch for batch in loader)


@pytest.mark.parametrize("seed", range(3))
def test_simulated_devices_have_the_bits_of_plain_pytorch(seed: int) -> None:
    expected = plain(DataLoader(dataset(), batch_size=4, shuffle=True))
    trained = model()
    optimizer = sgd(trained.parameters())
    device = SimulatedDevice(asynchronous=True, seed=seed)
    with (
        hydra_ext.offload(trained, optimizer, budget="24KiB", device=device) as run,
        data.from_dataset(dataset(), batch_size=4, shuffle=True, method="thread", device=run.device) as loader,
    ):
        steps(trained, optimizer, loader, STEPS)
    assert all(map(torch.equal, weights(trained), expected))


def test_a_state_is_that_of_the_batch_last_given() -> None:
    with data.Loader(data.ToDevice(Unlimited(1), "cpu", depth=4)) as loader:
        batches = iter(loader)
        assert [next(batches).item() for _ in range(3)] == [0, 1, 2]
        state = loader.state_dict()
    with data.Loader(data.ToDevice(Unlimited(1), "cpu")) as loader:
        loader.load_state_dict(state)
        assert next(iter(loader)).item() == 3


def test_other_devices_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"device='meta': give run\.device, 'cuda' or 'cpu'"):
        data.ToDevice(Recycled(), "meta")
    with pytest.raises(InvalidArgument, match="depth=0"):
        data.ToDevice(Recycled(), "cpu", depth=0)
