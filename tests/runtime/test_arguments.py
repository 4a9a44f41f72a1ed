"""What the root is given: containers stay the caller's own, and what the forward writes to them arrives."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C, Run
from hydra_ext.errors import StateError
from support.benches import ROOMY, assert_same
from support.runtime.outcomes import POISONED

ONES = torch.ones(1, 4)
Pair = namedtuple("Pair", ["left", "right"])


class Calls(nn.Module):
    """A layer, and a forward that is given with the arguments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(self.layer, *args, **kwargs)


def assert_equal(work: Callable[[nn.Module], list[Any]]) -> None:
    plain = work(Calls())
    model = Calls()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        offloaded = work(model)
        assert run.report().windows > 0
    assert_same(plain, offloaded)


def held(run: Run) -> int:
    return run.core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS)


def test_a_state_that_holds_tensors_takes_what_the_forward_puts_in_it() -> None:
    def forward(layer: nn.Module, x: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
        state["h"] = torch.tanh(layer(x) + state.get("h", 0)).detach()
        return state["h"].sum()

    def work(model: nn.Module) -> list[Any]:
        state: dict[str, torch.Tensor] = {"h": ONES / 3}
        return [*(model(forward, ONES, state) for _ in range(3)), state["h"]]

    assert_equal(work)


@pytest.mark.parametrize("make", [list, deque])
def test_a_list_keeps_the_order_that_the_forward_gives_it(make: Callable[[list[torch.Tensor]], Any]) -> None:
    def forward(layer: nn.Module, states: Any) -> torch.Tensor:
        states.append(layer(states[0]).detach())
        states.insert(0, states[-1] * 2)
        states.append(states[1])
        del states[2]
        return states[0].sum()

    def work(model: nn.Module) -> list[Any]:
        states = make([ONES, ONES * 2])
        return [model(forward, states), model(forward, states), *states]

    assert_equal(work)


def test_the_forward_sees_the_callers_containers_and_the_caller_keeps_the_tensors() -> None:
    first, second = torch.ones(1, 4), torch.ones(1, 4)
    mine: dict[str, Any] = OrderedDict(first=first, inner=[second, first], number=3)
    seen: list[Any] = []

    def forward(layer: nn.Module, given: Any, pair: Any) -> torch.Tensor:
        seen.extend([given, given["inner"], pair])
        assert given["first"] is given["inner"][1] is pair.right, "one tensor was moved more than once"
        assert given["first"] is not first, "nothing was moved, so that this proves nothing"
        return layer(given["first"] + given["inner"][0]).sum()

    model = Calls()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED):
        model(forward, mine, pair=Pair(mine["inner"], first))
    assert seen[0] is mine
    assert seen[1] is mine["inner"]
    assert isinstance(seen[2], Pair)
    assert seen[2].left is mine["inner"]
    assert list(mine) == ["first", "inner", "number"]
    assert mine["first"] is mine["inner"][1] is first
    assert mine["inner"][0] is second


def test_containers_are_given_back_when_the_forward_fails() -> None:
    first = torch.ones(1, 4)
    mine = {"first": first}

    def forward(_layer: nn.Module, given: dict[str, torch.Tensor]) -> None:
        given["added"] = given["first"]
        raise KeyboardInterrupt

    model = Calls()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        with pytest.raises(KeyboardInterrupt):
            model(forward, mine)
        assert mine == {"first": first, "added": first}
        assert mine["first"] is mine["added"] is first
        assert not run.core.gate.open


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_what_the_forward_writes_into_a_tensor_it_was_given_arrives(mode: Callable[[], Any]) -> None:
    def forward(layer: nn.Module, cache: list[torch.Tensor], alone: torch.Tensor) -> torch.Tensor:
        cache[0][1:2] = layer(cache[0][:1]).detach()
        alone.mul_(3)
        return layer(alone).sum().detach()

    def work(model: nn.Module) -> list[Any]:
        with mode():
            cache, alone = [torch.ones(3, 4)], torch.ones(1, 4)
            return [model(forward, cache, alone), model(forward, cache, alone), cache[0], alone]

    assert_equal(work)


def test_a_sum_that_the_forward_adds_to_keeps_its_history() -> None:
    def forward(layer: nn.Module, losses: dict[str, torch.Tensor]) -> None:
        losses["sum"] += layer(ONES).sum()

    def work(model: nn.Module) -> list[Any]:
        losses = {"sum": torch.zeros(())}
        for _ in range(2):
            model(forward, losses)
        losses["sum"].backward()  # type: ignore[no-untyped-call]
        return [losses["sum"], *(parameter.grad for parameter in model.parameters())]

    assert_equal(work)


def test_a_cache_that_is_on_the_device_is_not_copied_again() -> None:
    cache: dict[str, torch.Tensor] = {}
    pointers: list[int] = []

    def forward(layer: nn.Module, x: torch.Tensor, cache: dict[str, torch.Tensor]) -> torch.Tensor:
        cache.setdefault("key", layer(x).detach())
        pointers.append(cache["key"].data_ptr())
        return cache["key"].sum()

    model = Calls()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run, torch.no_grad():
        for _ in range(3):
            model(forward, ONES, cache)
        assert cache["key"].data_ptr() == pointers[0]
        assert held(run) == cache["key"].untyped_storage().nbytes()
    assert len(set(pointers)) == 1


def test_nothing_that_was_given_is_held_after_the_call() -> None:
    class Cache:
        """Of a kind that only its user knows."""

    def forward(layer: nn.Module, given: dict[str, Any], cache: Cache) -> None:
        cache.key = layer(given["x"]).detach()  # type: ignore[attr-defined]

    model = Calls()
    gc.disable()
    try:
        with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
            cache = Cache()
            model(forward, {"x": ONES}, cache)
            assert held(run) > 0, "nothing was charged, so that this proves nothing"
            del cache
            assert held(run) == 0
    finally:
        gc.enable()


def test_a_list_that_holds_itself_is_taken_as_it_is() -> None:
    mine: list[Any] = [ONES]
    mine.append(mine)

    def forward(layer: nn.Module, given: list[Any]) -> torch.Tensor:
        assert given[1] is given is mine
        return layer(given[0]).sum()

    assert_equal(lambda model: [model(forward, mine)])
    assert mine[0] is ONES


@pytest.mark.parametrize("clones", [False, True])
def test_a_write_to_one_of_two_views_of_one_memory_is_refused_as_the_other_does_not_see_it(clones: bool) -> None:
    def forward(layer: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return (layer(x) - y).square().sum()

    def work(model: nn.Module) -> list[Any]:
        tokens = torch.arange(5.0)[None]
        views = tokens[:, :-1], tokens[:, 1:]
        given = [view.clone() for view in views] if clones else views
        return [model(forward, *given), *views]

    if clones:
        assert_equal(work)
        return
    model = Calls()
    with hydra_ext.offload(model, budget=ROOMY), pytest.raises(StateError, match=r"shape \[1, 4\].*clones"):
        work(model)
