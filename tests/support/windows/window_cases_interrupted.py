"""The window's cases of failures: exceptions and interrupts, caught at once or kept alive for long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from support.benches import Bench, Case, Outcome
from support.windows.window_cases import case_of, gradients, train
from support.windows.window_subjects import batch, hidden, language_loss

CASES: list[Case] = []
case = case_of(CASES)


class Stop(Exception):
    """Raised by a user's hook."""


def raising(error: type[BaseException]) -> Any:
    def hook(*_args: Any) -> None:
        raise error("raised by a hook")

    return hook


@contextmanager
def before_call(module: nn.Module, error: type[BaseException], *, first: bool = False) -> Iterator[None]:
    handle = module.register_forward_pre_hook(raising(error), prepend=first)
    yield
    handle.remove()


@contextmanager
def during_backward(module: nn.Module, error: type[BaseException]) -> Iterator[None]:
    def spoil(_module: nn.Module, _args: Any, output: Any) -> None:
        (output[0] if isinstance(output, tuple) else output).register_hook(raising(error))

    handle = module.register_forward_hook(spoil)
    yield
    handle.remove()


def interrupted_call(bench: Bench) -> BaseException:
    """Calls a block directly, and ends the call by Ctrl-C. The returned exception keeps all frames alive."""
    block = bench.model.transformer.h[1]
    with before_call(block.mlp, KeyboardInterrupt), pytest.raises(KeyboardInterrupt) as caught:
        block(hidden(0))
    return caught.value


# ---- forward --------------------------------------------------------------------------------------------------------


@case()
def an_exception_in_a_forward(bench: Bench) -> Outcome:
    with before_call(bench.model.transformer.h[1], Stop), pytest.raises(Stop):
        language_loss(bench.model, 0)
    bench.assert_at_rest()
    return train(bench)


@case()
def an_interrupt_in_a_forward(bench: Bench) -> Outcome:
    with before_call(bench.model.transformer.h[1], KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        language_loss(bench.model, 0)
    bench.assert_at_rest()
    return train(bench)


@case()
def an_interrupt_in_a_direct_call(bench: Bench) -> Outcome:
    interrupted_call(bench)
    bench.assert_at_rest()
    return train(bench)


@case()
def an_interrupt_in_a_direct_call_kept_while_the_root_trains(bench: Bench) -> Outcome:
    losses = train(bench, steps=1)
    kept = interrupted_call(bench)
    losses += train(bench, first=1, steps=2)
    return [*losses, repr(kept)]


@case()
def an_interrupt_in_a_direct_call_kept_while_blocks_are_called(bench: Bench) -> Outcome:
    kept = interrupted_call(bench)

    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        return model.lm_head(model.transformer(batch(index), use_cache=False).last_hidden_state).pow(2).mean()

    return [*train(bench, loss_of), repr(kept)]


@case()
def an_interrupt_in_a_direct_call_kept_while_backward_runs(bench: Bench) -> Outcome:
    loss = language_loss(bench.model, 0)
    kept = interrupted_call(bench)
    loss.backward()
    bench.assert_at_rest()
    return [loss.detach(), *gradients(bench.model), repr(kept)]


@case()
def an_interrupt_in_a_direct_call_of_a_thread(bench: Bench) -> Outcome:
    kept: list[BaseException] = []
    thread = threading.Thread(target=lambda: kept.append(interrupted_call(bench)))
    thread.start()
    thread.join()
    assert len(kept) == 1
    bench.assert_at_rest()
    return train(bench)


@case()
def an_interrupt_swallowed_inside_the_root(bench: Bench) -> Outcome:
    def swallow(_module: nn.Module, _args: Any) -> None:
        interrupted_call(bench)

    handle = bench.model.transformer.h[0].register_forward_pre_hook(swallow)
    losses = train(bench)
    handle.remove()
    return losses


@case()
def hooks_that_raise_before_all_others(bench: Bench) -> Outcome:
    model = bench.model
    for module, argument in (
        (model.transformer.h[1], hidden(0)),
        (model.transformer.wte, batch(0)),
        (model.lm_head, hidden(0)),
        (model, batch(0)),
    ):
        for error in (Stop, KeyboardInterrupt):
            with before_call(module, error, first=True):
                with pytest.raises(error):
                    language_loss(model, 0)
                with pytest.raises(error):
                    module(argument)
            bench.assert_at_rest()
    return train(bench)


@case()
def hooks_that_raise_after_a_forward(bench: Bench) -> Outcome:
    model = bench.model
    for module, argument in ((model.transformer.h[1], hidden(0)), (model, batch(0))):
        for first in (False, True):
            for error in (Stop, KeyboardInterrupt):
                handle = module.register_forward_hook(raising(error), prepend=first, always_call=first)
                with pytest.raises(error):
                    language_loss(model, 0)
                with pytest.raises(error):
                    module(argument)
                handle.remove()
                bench.assert_at_rest()
    return train(bench)


# ---- backward -------------------------------------------------------------------------------------------------------


@case()
def an_exception_in_a_backward(bench: Bench) -> Outcome:
    with during_backward(bench.model.transformer.h[0], Stop):
        loss = language_loss(bench.model, 0)
        with pytest.raises(Stop):
            loss.backward()
    bench.assert_at_rest()
    bench.model.zero_grad()
    del loss
    return train(bench)


@case()
def an_interrupt_in_a_backward(bench: Bench) -> Outcome:
    with during_backward(bench.model.transformer.h[0], KeyboardInterrupt):
        loss = language_loss(bench.model, 0)
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    bench.assert_at_rest()
    bench.model.zero_grad()
    del loss
    return train(bench)


@case(passes=2)
def an_exception_in_a_backward_whose_graph_is_kept(bench: Bench) -> Outcome:
    with during_backward(bench.model.transformer.h[0], Stop):
        loss = language_loss(bench.model, 0)
        with pytest.raises(Stop):
            loss.backward()
    bench.model.zero_grad()
    losses = train(bench)
    return [loss.detach(), *losses]
