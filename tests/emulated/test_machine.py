"""The emulated CUDA machine under torch: a missing wait is a wrong number, and choices of torch are a GPU's."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import emulated_cuda
import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.emulated

MIB = 2**20
LONG = 100_000_000  # cycles: a twentieth of a second
OUT_OF_MEMORY = 2
LAUNCH_FAILED = 719


@pytest.fixture(autouse=True)
def _nothing_cached() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.empty_cache()


def pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory()


# ---- devices --------------------------------------------------------------------------------------------------------


def test_torch_sees_two_devices() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_name()
    assert torch.cuda.get_device_capability() >= (8, 0)
    assert torch.cuda.get_device_properties(1).total_memory == torch.cuda.mem_get_info(1)[1]
    assert str(torch.accelerator.current_accelerator()) == "cuda"
    assert torch.accelerator.device_count() == 2


def test_tensors_name_their_device() -> None:
    host = torch.arange(6.0).view(2, 3)
    assert host.cuda().device == torch.device("cuda", 0)
    assert host.to("cuda:1").device == torch.device("cuda", 1)
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1
    with torch.device("cuda"):
        assert torch.zeros(2).is_cuda
    assert repr(host.cuda()) == "tensor([[0., 1., 2.],\n        [3., 4., 5.]], device='cuda:0')"
    assert torch.equal(host.cuda(0).to("cuda:1").cpu(), host)


def test_tensors_of_two_devices_do_not_meet() -> None:
    here, there = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2, device="cuda"))
    assert torch.equal((here + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))


def test_a_host_that_touches_device_memory_dies() -> None:
    if not emulated_cuda.memory_is_guarded():
        assert sys.platform == "linux"  # without protection keys the rest of the tests runs unguarded
        return
    program = """
import ctypes, emulated_cuda
emulated_cuda.load()
import torch
tensor = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
ctypes.string_at(tensor.data_ptr() + 8, 4)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode < 0
    assert "device" in ended.stderr


# ---- streams --------------------------------------------------------------------------------------------------------


def test_a_host_that_does_not_wait_reads_what_was_there() -> None:
    source = torch.full((1000,), 7.0, device="cuda")
    target = pinned(torch.zeros(1000))
    torch.cuda._sleep(LONG)
    target.copy_(source, non_blocking=True)
    assert target.sum() == 0
    torch.cuda.synchronize()
    assert target.sum() == 7000


def test_item_and_copies_to_pageable_memory_wait() -> None:
    source = torch.full((1000,), 7.0, device="cuda")
    torch.cuda._sleep(LONG)
    assert source.sum().item() == 7000
    target = torch.zeros(1000)
    torch.cuda._sleep(LONG)
    target.copy_(source, non_blocking=True)
    assert target.sum() == 7000


def test_pageable_sources_are_read_at_the_call_and_pinned_ones_late() -> None:
    for source, expected in ((torch.ones(1000), 1000), (pinned(torch.ones(1000)), 2000)):
        target = torch.zeros(1000, device="cuda")
        torch.cuda._sleep(LONG)
        target.copy_(source, non_blocking=True)
        source.fill_(2)
        assert target.sum().item() == expected


def test_operators_run_behind_the_host() -> None:
    x = torch.randn(64, 64, device="cuda")
    for _ in range(2):  # the first call of an operator with a shape is waited for
        behind, waited = emulated_cuda.operator_calls()
        y = (x @ x).relu().softmax(dim=1)
    assert emulated_cuda.operator_calls()[1] == waited
    assert emulated_cuda.operator_calls()[0] - behind == 3
    assert y.shape == (64, 64)


def test_streams_run_beside_each_other_and_events_order_them() -> None:
    x = torch.zeros(1000, device="cuda")
    side = torch.cuda.Stream()
    x.sum()
    torch.cuda.synchronize()
    for waits in (False, True):
        x.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        x.fill_(1)
        if waits:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            seen = x.sum()
        side.synchronize()
        with torch.cuda.stream(side):
            assert seen.item() == (1000 if waits else 0)
        torch.cuda.synchronize()


def test_events_tell_what_has_run_and_how_long_it_took() -> None:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(LONG)
    end.record()
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert 40 < start.elapsed_time(end) < 5000


def test_streams_have_handles_and_devices() -> None:
    stream = torch.cuda.Stream(device=1)
    assert stream.device == torch.device("cuda", 1)
    assert isinstance(stream, torch.Stream)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream(1) == stream
        assert torch.cuda.current_device() == 1
        again = torch.cuda.ExternalStream(stream.cuda_stream, device=1)
        assert again.cuda_stream == stream.cuda_stream
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.cuda.default_stream().cuda_stream == 0


def test_memory_used_on_another_stream_needs_record_stream() -> None:
    side = torch.cuda.Stream()
    for recorded in (False, True):
        x = torch.ones(5000, device="cuda")
        seen = torch.zeros((), device="cuda")
        torch.sum(x, 0, out=seen)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            torch.sum(x, 0, out=seen)
            if recorded:
                x.record_stream(side)
        del x
        torch.full((5000,), 3.0, device="cuda")
        torch.cuda.synchronize()
        assert (seen.item() == 5000) is recorded


def test_a_sleeping_stream_of_a_thread_is_its_own() -> None:
    seen = []

    def work() -> None:
        seen.append(torch.cuda.current_stream() == torch.cuda.default_stream())

    with torch.cuda.stream(torch.cuda.Stream()):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [True]


def test_backward_runs_on_the_device_thread_of_autograd() -> None:
    where = []
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    weight.register_hook(lambda gradient: where.append(threading.get_ident()) or gradient)
    (torch.ones(4, 8, device="cuda") @ weight).pow(2).sum().backward()
    assert where
    assert where[0] != threading.get_ident()
    assert weight.grad is not None
    assert weight.grad.is_cuda


def test_a_capture_is_known_to_torch() -> None:
    assert not torch.cuda.is_current_stream_capturing()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert torch.cuda.is_current_stream_capturing()
    assert not torch.cuda.is_current_stream_capturing()


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_figures_of_memory_are_those_of_the_allocator() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 * MIB
    assert torch.cuda.memory_reserved() >= 20 * MIB
    assert torch.cuda.max_memory_allocated() - before == 3 * MIB
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0
    free, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free
    assert torch.cuda.get_device_properties(0).total_memory == total
    assert torch.cuda.memory_summary()
    assert isinstance(torch.cuda.memory_snapshot(), list)


def test_the_fraction_limits_what_is_reserved() -> None:
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(64 * MIB / total)
    try:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="out of memory"):
            torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
        torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
        assert torch.cuda.memory_stats()["num_ooms"] >= 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")


def test_a_device_without_memory_raises_torchs_error() -> None:
    torch.cuda.empty_cache()
    emulated_cuda.fail("cudaMalloc", OUT_OF_MEMORY)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, dtype=torch.uint8, device="cuda")


def test_pinned_memory_is_known_and_used_again() -> None:
    host = pinned(torch.ones(1000))
    assert host.is_pinned()
    assert not torch.ones(1000).is_pinned()
    assert torch.empty(5, pin_memory=True).is_pinned()
    address = host.data_ptr()
    device = torch.empty(1000, device="cuda")
    torch.cuda._sleep(LONG)
    device.copy_(host, non_blocking=True)
    del host
    other = pinned(torch.full((1000,), 2.0))  # not the block that is still read
    assert other.data_ptr() != address
    assert device.sum().item() == 1000


def test_storages_are_resized() -> None:
    x = torch.arange(10.0, device="cuda")
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(40)
    x.fill_(3)
    assert x.sum().item() == 30
    x.resize_(20)
    assert x[:10].sum().item() == 30


# ---- failures -------------------------------------------------------------------------------------------------------


def test_errors_of_arguments_are_raised_at_the_call() -> None:
    x = torch.randn(3, 4, device="cuda")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        x @ x
    with pytest.raises(IndexError):
        x.sum(dim=5)
    with pytest.raises(RuntimeError):
        x.view(5)
    assert torch.isfinite(x.sum())


def test_an_index_out_of_range_fails_the_device_once_shapes_are_known() -> None:
    table, index = torch.randn(5, 3, device="cuda"), torch.tensor([4], device="cuda")
    torch.index_select(table, 0, index)
    index.fill_(7)

    def select() -> None:  # the fault may show in either call
        torch.index_select(table, 0, index)
        torch.cuda.synchronize()

    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        select()
    assert "index" in emulated_cuda.fault_message()
    emulated_cuda.reset()
    assert torch.ones(2, device="cuda").sum().item() == 2


def test_a_failed_device_raises_until_the_machine_is_reset() -> None:
    x = torch.ones(10, device="cuda")
    emulated_cuda.set_fault(0, LAUNCH_FAILED)
    with pytest.raises(torch.AcceleratorError):
        x + 1
    with pytest.raises(torch.AcceleratorError):
        torch.cuda.synchronize()
    emulated_cuda.reset()
    assert (torch.ones(10, device="cuda") + 1).sum().item() == 20


# ---- random numbers -------------------------------------------------------------------------------------------------


def draws() -> list[Tensor]:
    x = torch.empty(100, device="cuda")
    return [
        torch.randn(100, device="cuda"),
        torch.rand(7, 3, device="cuda"),
        torch.randint(0, 1000, (50,), device="cuda"),
        torch.randperm(30, device="cuda"),
        x.normal_().clone(),
        torch.bernoulli(torch.full((40,), 0.5, device="cuda")),
        nn.functional.dropout(torch.ones(200, device="cuda"), 0.3),
        torch.multinomial(torch.ones(20, device="cuda"), 5),
    ]


def test_random_numbers_follow_seed_and_offset() -> None:
    torch.cuda.manual_seed(3)
    first = draws()
    assert not torch.equal(first[0].cpu(), first[4].cpu())
    torch.cuda.manual_seed(3)
    emulated_cuda.set_delays(2e-3, 9)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(first, draws(), strict=True))
    state = torch.cuda.get_rng_state()
    assert state.dtype == torch.uint8
    assert state.numel() == 16
    a = torch.rand(5, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="cuda").cpu(), a.cpu())
    with torch.random.fork_rng(devices=[0]):
        torch.rand(5, device="cuda")
    assert torch.cuda.initial_seed() == 3


def test_generators_of_a_device_are_its_own() -> None:
    generator = torch.Generator(device="cuda").manual_seed(5)
    a = torch.randn(4, device="cuda", generator=generator)
    assert generator.get_offset() > 0
    b = torch.randn(4, device="cuda", generator=generator)
    generator.manual_seed(5)
    assert torch.equal(torch.randn(4, device="cuda", generator=generator).cpu(), a.cpu())
    assert not torch.equal(a.cpu(), b.cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device="cuda", generator=torch.Generator())


# ---- models ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, num_layers=2, dropout=0.2)
        self.gru = nn.GRU(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16, padding_idx=0)
        self.out = nn.Linear(16, 50)

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(self.table(words)).flatten(0, 1), words.flatten())


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.2), nn.Linear(64, 8))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.GroupNorm(2, 8), nn.SiLU(), nn.AdaptiveAvgPool2d(2),
        nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Flatten(), nn.Linear(64, 5),
    )  # fmt: skip


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


Make = Callable[[], nn.Module]
MODELS: dict[str, tuple[Make, Callable[[], Tensor]]] = {
    "perceptron": (perceptron, lambda: torch.randn(16, 32)),
    "convolutional": (convolutional, lambda: torch.randn(4, 3, 16, 16)),
    "attention": (Attention, lambda: torch.randn(2, 10, 32)),
    "recurrent": (Recurrent, lambda: torch.randn(5, 3, 16)),
    "words": (Words, lambda: torch.randint(1, 50, (4, 12))),
    "gpt2": (gpt2, lambda: torch.randint(0, 64, (2, 12))),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
}


def trained(model: nn.Module, batches: list[Tensor], optimizer: str) -> list[Tensor]:
    """Losses and final values, on the host. One copy of the host's batch to each step, behind the host."""
    torch.cuda.manual_seed(1)
    model = copy.deepcopy(model).cuda()
    steps = OPTIMIZERS[optimizer](model)
    losses = []
    for batch in batches:
        found = model(batch.cuda(non_blocking=True))
        loss = found if isinstance(found, Tensor) else found.logits
        loss = loss.float().pow(2).mean()
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.detach())
    values = [value.detach().cpu() for value in model.state_dict().values()]
    return [loss.cpu() for loss in losses] + values


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_models_train_equal_whatever_the_delays(name: str, optimizer: str) -> None:
    make, draw = MODELS[name]
    model, batches = make(), [draw().pin_memory() for _ in range(4)]
    expected = trained(model, batches, optimizer)
    assert all(torch.isfinite(value).all() for value in expected)
    for seed in range(3):
        emulated_cuda.set_delays(1e-3, seed)
        found = trained(model, batches, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_model_without_random_layers_agrees_with_the_host() -> None:
    model, x = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(16, 32)
    on_device = copy.deepcopy(model).cuda()
    model(x).pow(2).mean().backward()
    on_device(x.cuda()).pow(2).mean().backward()
    for a, b in zip(model.parameters(), on_device.parameters(), strict=True):
        torch.testing.assert_close(b.grad.cpu(), a.grad)  # type: ignore[union-attr]


def test_autocast_casts_as_on_a_gpu() -> None:
    linear, x = nn.Linear(16, 16).cuda(), torch.randn(4, 16, device="cuda")
    with torch.autocast("cuda"):
        assert linear(x).dtype == torch.float16
        assert linear(x).softmax(dim=-1).dtype == torch.float32
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = linear(x).float().sum()
    loss.backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_a_scaler_of_gradients_skips_infinite_steps() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for infinite in (False, True):
        before = model.weight.detach().clone()
        scaler.scale(model(torch.ones(2, 8, device="cuda")).sum()).backward()
        if infinite:
            assert model.weight.grad is not None
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before.cpu(), model.weight.detach().cpu()) is infinite
    assert scaler.get_scale() == 2.0


def test_a_model_is_saved_and_loaded(tmp_path: object) -> None:
    model = perceptron().cuda()
    path = f"{tmp_path}/model.pt"
    torch.save(model.state_dict(), path)
    loaded = torch.load(path, weights_only=True)
    assert all(value.is_cuda for value in loaded.values())
    assert torch.load(path, map_location="cpu", weights_only=True)["0.weight"].device.type == "cpu"
    again = copy.deepcopy(model)
    assert torch.equal(again[0].weight.cpu(), loaded["0.weight"].cpu())


def test_loaders_pin_their_batches() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    seen = [batch.cuda(non_blocking=True) for (batch,) in torch.utils.data.DataLoader(data, 4, pin_memory=True)]
    assert torch.equal(torch.cat(seen).cpu(), torch.arange(8.0))
