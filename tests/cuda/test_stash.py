"""A stash on a GPU: the same gradients as without, and with Compress the same but for layers' weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext.errors import StateError
from hydra_ext.runtime.placement import devices
from support.gpu import EMULATED, on_stream
from support.stash.stashed import assert_empty, assert_same, gradients

LAYERS = (nn.Linear, nn.Conv2d)


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 64, 64), nn.GELU(), nn.Linear(64, 8)).cuda().to(dtype)


def picture(dtype: torch.dtype = torch.float32) -> Tensor:
    count = 4 if EMULATED else 16
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(1)).cuda().to(dtype)


@pytest.mark.parametrize("budget", [None, 4 * 2**20, 2**33])
@pytest.mark.parametrize(
    "policy",
    [hydra_ext.Offload(), hydra_ext.Offload("conv"), {"": hydra_ext.Offload(), "[2-9]": hydra_ext.Recompute()}],
    ids=["all", "conv", "recompute"],
)
def test_lossless_policies_give_the_same_bits(policy: object, budget: int | None) -> None:
    model, x = net(), picture()
    stash = hydra_ext.stash(policy, model=model, budget=budget, device="cuda")  # type: ignore[arg-type]
    for _ in range(3):
        expected = gradients(model, lambda: model(x).square().sum())
        assert_same(gradients(model, lambda: model(x).square().sum(), stash), expected)
        assert_empty(stash.report())
    assert stash.report().intervals > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("budget", [None, 4 * 2**20])
def test_errors_reach_weights_of_layers_alone(budget: int | None, dtype: torch.dtype) -> None:
    model, x = net(dtype), picture(dtype)
    weights = {module.weight for module in model.modules() if isinstance(module, LAYERS)}
    stash = hydra_ext.stash(hydra_ext.Compress(), model=model, budget=budget, device="cuda")
    for step in range(4):
        expected = gradients(model, lambda: model(x).square().sum())
        found = gradients(model, lambda: model(x).square().sum(), stash)
        assert torch.equal(found[0], expected[0])
        for parameter, one, other in zip(model.parameters(), found[1:], expected[1:], strict=True):
            if parameter not in weights:
                assert torch.equal(one, other)
            elif step > 0:
                assert (one - other).norm() <= 0.05 * other.norm()
    report = stash.report()
    assert report.compressed > 8
    assert report.stream_bytes < report.compressed_bytes / 3
    assert_empty(report)


def test_streams_are_those_of_the_simulated_device() -> None:
    def stored(device: str) -> list[int]:
        model, x = net(), picture()
        if device == "simulated":
            model, x = model.cpu(), x.cpu()
        with torch.no_grad():  # so that both have the same numbers to compress
            for parameter in model.parameters():
                parameter.zero_()
        stash = hydra_ext.stash(hydra_ext.Compress(error=0.01), model=model, device=device)
        gradients(model, lambda: model(x).square().sum(), stash)
        return [stash.report().compressed_bytes, stash.report().stream_bytes]

    assert stored("cuda") == stored("simulated")


@pytest.mark.parametrize("options", [{}, {"padding": 1}, {"stride": 1}, {"dilation": 2, "ceil_mode": True}])
@pytest.mark.parametrize("channels_last", [False, True])
def test_indices_of_pools_come_back(options: dict[str, int], channels_last: bool) -> None:
    x = torch.randn(3, 40, 37, 53).cuda()
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format).requires_grad_()
    pool = nn.MaxPool2d(3, **options)  # type: ignore[arg-type]
    expected = torch.autograd.grad(pool(x * 1).sin().sum(), [x])
    stash = hydra_ext.stash(hydra_ext.Compress(), device="cuda")
    with stash:
        loss = pool(x * 1).sin().sum()
    assert_same(list(torch.autograd.grad(loss, [x])), list(expected))
    assert stash.report().compressed >= 1


def test_streams_that_share_a_saved_tensor_all_wait_for_it() -> None:
    """Backward reads it on both, and first where nothing else waits. Its copy is late, and memory is used again."""
    home, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda").requires_grad_()

    def loss_of() -> Tensor:
        shared = (x * 1).relu()
        side.wait_stream(home)
        with torch.cuda.stream(side):
            there = shared * shared
        here = shared.cos() * shared
        home.wait_stream(side)
        return (here + there).sum()

    (expected,) = torch.autograd.grad(loss_of(), [x])
    expected = expected.cpu()
    place = devices.choose("cuda")
    stash = hydra_ext.stash(hydra_ext.Offload(), device=place)
    for _ in range(5):
        with stash:
            loss = loss_of()
        stash.report()  # waits until all has left
        for stream in (home, side):
            with torch.cuda.stream(stream):
                noise = [torch.full((512, 512), float("nan"), device="cuda") for _ in range(8)]
                del noise
        with on_stream(place._backend.to_device_stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(400_000_000)
        (found,) = torch.autograd.grad(loss, [x])
        assert torch.equal(found.cpu(), expected)
    assert stash.report().to_device_bytes > 0


def test_memory_that_came_back_is_not_used_again_while_another_stream_reads_it() -> None:
    """The reader on the other stream is late. The stream that saved reads last, and allocates as much at once."""
    home, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x, u = torch.randn(512, 512, device="cuda"), torch.randn(512, 512, device="cuda").requires_grad_()
    of_home = torch.randn(512, 512, device="cuda").requires_grad_()
    side.wait_stream(home)
    with torch.cuda.stream(side):
        of_side = torch.randn(512, 512, device="cuda").requires_grad_()

    def loss_of() -> Tensor:
        needs_memory = u.sin().cos().exp()
        shared = x.relu()
        shared.record_stream(side)
        here = shared * of_home
        side.wait_stream(home)
        with torch.cuda.stream(side):
            there = shared * of_side
            there.register_hook(lambda _: torch.cuda._sleep(400_000_000))
        home.wait_stream(side)
        return (here + there + needs_memory).sum()

    leaves = [of_home, of_side, u]
    expected = [gradient.cpu() for gradient in torch.autograd.grad(loss_of(), leaves)]
    stash = hydra_ext.stash(hydra_ext.Offload(), device="cuda")
    for _ in range(3):
        with stash:
            loss = loss_of()
        stash.report()  # waits until all has left
        found = torch.autograd.grad(loss, leaves)
        torch.cuda.synchronize()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
    assert stash.report().to_device_bytes > 0


def test_a_tensor_leaves_behind_the_stream_that_saved_it() -> None:
    """The stream that saved is late. Backward on another one needs room, and the tensor leaves then."""
    side = torch.cuda.Stream()
    of_home = torch.randn(512, 512, device="cuda").requires_grad_()
    with torch.cuda.stream(side):
        of_side = torch.randn(512, 512, device="cuda").requires_grad_()

    def losses() -> tuple[Tensor, Tensor]:
        here = of_home.tanh().tanh().tanh().sum()
        with torch.cuda.stream(side):
            torch.cuda._sleep(400_000_000)
            there = of_side.exp().sum()
        return here, there

    def found_in(here: Tensor, there: Tensor) -> list[Tensor]:
        found = [*torch.autograd.grad(here, [of_home], retain_graph=True), *torch.autograd.grad(there, [of_side])]
        torch.cuda.synchronize()
        return [gradient.cpu() for gradient in found]

    expected = found_in(*losses())
    stash = hydra_ext.stash(hydra_ext.Offload(), budget=2 * of_home.nbytes, device="cuda")
    for _ in range(3):
        with stash:
            both = losses()
        for one, other in zip(found_in(*both), expected, strict=True):
            assert torch.equal(one, other)
        del both  # ends the pass, of which the next one's plan is made
    assert stash.report().to_device_bytes > 0


def _stash_of_two(x: Tensor) -> tuple[Any, Any]:
    """Has room for two tensors of that size. Returns the device too."""
    place = devices.choose("cuda")
    return hydra_ext.stash(hydra_ext.Offload(), budget=2 * x.nbytes, device=place), place


def _train(x: Tensor, stash: Any, place: Any, *, fails: bool) -> None:
    """One forward and backward. If it fails, returns of saved tensors are late, and still under way then."""

    def fail(_: Tensor) -> None:
        raise ValueError("on purpose")

    with stash:
        second = x.tanh().tanh()
        loss = second.tanh().tanh().sum()
    stash.report()  # waits until the first two have left
    if fails:
        second.register_hook(fail)
        with on_stream(place._backend.to_device_stream):
            torch.cuda._sleep(400_000_000)
    with pytest.raises(ValueError, match="on purpose") if fails else nullcontext():
        loss.backward()


def test_memory_that_a_late_return_fills_is_not_used_again_though_backward_has_failed() -> None:
    x = torch.randn(512, 512, device="cuda").requires_grad_()
    stash, place = _stash_of_two(x)
    for fails in (False, True):
        _train(x, stash, place, fails=fails)
        others = [torch.full((512, 512), 7.0, device="cuda") for _ in range(8)]
    report = stash.report()  # waits until all has come
    assert report.prefetched > 0
    for other in others:
        assert torch.equal(other.cpu(), torch.full((512, 512), 7.0))


def test_host_memory_that_a_late_return_reads_stays_though_backward_has_failed() -> None:
    """Saved tensors of another size are next: for them the pool lets go of the memory that it has."""
    x, larger = torch.randn(512, 512, device="cuda").requires_grad_(), torch.randn(1024, 1024, device="cuda")
    larger.requires_grad_()
    stash, place = _stash_of_two(x)
    for fails in (False, True):
        _train(x, stash, place, fails=fails)
    with stash:
        loss = larger.tanh().tanh().sum()
    (found,) = torch.autograd.grad(loss, [larger])
    stash.report()  # waits until all has come
    (expected,) = torch.autograd.grad(larger.tanh().tanh().sum(), [larger])
    assert torch.equal(found.cpu(), expected.cpu())


@pytest.mark.parametrize("policy", [hydra_ext.Offload(), hydra_ext.Compress()], ids=["moved", "compressed"])
def test_memory_of_another_stream_stays_until_the_operator_that_saves_it_has_read_it(policy: object) -> None:
    """The graph keeps the tensor until backward, so plain PyTorch needs no record_stream() here."""
    home, side = torch.cuda.current_stream(), torch.cuda.Stream()
    source = torch.randn(512, 512, device="cuda").requires_grad_()
    weight = torch.randn(512, 512, device="cuda").requires_grad_()

    def output_of(saving: AbstractContextManager[object]) -> Tensor:
        x = source.cos()
        side.wait_stream(home)
        with torch.cuda.stream(side), saving:
            early = nn.functional.gelu(x) * weight
            torch.cuda._sleep(400_000_000)
            return nn.functional.gelu(x) + early

    plain = output_of(nullcontext())  # its graph has to stay until it is there
    home.wait_stream(side)
    expected = plain.detach().cpu()
    del plain
    stash = hydra_ext.stash(policy, device="cuda")  # type: ignore[arg-type]
    for _ in range(3):
        found = output_of(stash)
        stash.report()  # waits until all has left
        noise = [torch.full((512, 512), float("nan"), device="cuda") for _ in range(8)]
        home.wait_stream(side)
        assert torch.equal(found.detach().cpu(), expected)
        del found, noise


def test_compression_makes_room_while_its_own_allocations_ask_for_it() -> None:
    """Each allocation of a coder may ask for room, which the saved tensors themselves can make."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(16)])
    batches = [torch.randn(128, 1024) for _ in range(2)]
    with hydra_ext.offload(
        model, None, budget=44 * 2**20, device="cuda", activations=hydra_ext.Compress(error=1e-3)
    ) as run:
        for batch in batches:
            model(batch).square().mean().backward()
        report = run.report()
    assert report.peak_bytes <= 44 * 2**20
    assert report.activations is not None
    assert report.activations.compressed > 0
    assert report.spills > 0
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_two_threads_finish_a_stream_once() -> None:
    """Each makes room of what the other has just compressed, on a stream of its own that is late."""
    stash = hydra_ext.stash(hydra_ext.Compress(error=1e-3), budget=2**18, device="cuda")
    ended: list[int] = []

    def train(number: int) -> None:
        layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
        with torch.cuda.stream(torch.cuda.Stream()):
            model, x = nn.Sequential(*layers).cuda(), torch.randn(256, 256, device="cuda")
            for _ in range(3):
                torch.cuda._sleep(100_000_000)
                with stash:
                    loss = model(x).square().mean()
                loss.backward()
        ended.append(number)

    threads = [Thread(target=train, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == [0, 1]
    torch.cuda.synchronize()
    assert stash.report().compressed > 0


def test_a_tensor_is_compressed_behind_the_stream_that_saved_it() -> None:
    """That stream is late. Another one saves a tensor, with which the first is compressed."""
    home, side = torch.cuda.current_stream(), torch.cuda.Stream()
    of_home = torch.randn(512, 512, device="cuda").requires_grad_()
    side.wait_stream(home)
    with torch.cuda.stream(side):
        of_side = torch.randn(512, 512, device="cuda").requires_grad_()

    def loss_of() -> Tensor:
        torch.cuda._sleep(400_000_000)
        here = of_home.mul(2).relu()
        with torch.cuda.stream(side):
            there = of_side.mul(2).relu()
        home.wait_stream(side)
        return (here + there).sum()

    leaves = [of_home, of_side]
    expected = [gradient.cpu() for gradient in torch.autograd.grad(loss_of(), leaves)]
    stash = hydra_ext.stash(hydra_ext.Compress(), device="cuda")
    for _ in range(3):
        with stash:
            loss = loss_of()
        found = torch.autograd.grad(loss, leaves)
        torch.cuda.synchronize()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)  # relu needs signs alone, which come back
        del loss
    assert stash.report().compressed > 0


def test_an_index_outside_its_window_is_refused() -> None:
    """torch saves none. This one is written where autograd does not see it, and found when its code leaves."""
    x = torch.randn(2, 16, 64, 64, device="cuda").requires_grad_()
    stash = hydra_ext.stash(hydra_ext.Compress(), device="cuda")
    with stash:
        pooled, indices = nn.functional.max_pool2d(x * 1, 2, return_indices=True)
        indices.data[0, 0, 0, 0] = 64 * 64 - 1
        pooled = pooled.relu()  # now the indices are encoded
        torch.cuda.synchronize()
        with pytest.raises(StateError, match="outside its window"):
            pooled.relu()
