"""The window's cases about the model's own parameters: frozen, loaded, written, hooked, copied."""

from __future__ import annotations

import copy

import torch

from support.benches import Bench, Case, Outcome
from support.windows.window_cases import case_of, train

CASES: list[Case] = []
case = case_of(CASES)


@case()
def blocks_frozen_and_thawed(bench: Bench) -> Outcome:
    block = bench.model.transformer.h[0]
    losses = train(bench, steps=1)
    block.requires_grad_(False)
    losses += train(bench, steps=2, first=1)
    assert all(parameter.grad is None for parameter in block.parameters())
    block.requires_grad_(True)
    return losses + train(bench, steps=1, first=3)


@case()
def state_loaded_and_data_written_in_bulk(bench: Bench) -> Outcome:
    state = {name: value.clone() for name, value in bench.model.state_dict().items()}
    losses = train(bench, steps=2)
    bench.model.load_state_dict(state)
    for parameter in bench.model.parameters():
        parameter.data.mul_(0.9)
    return losses + train(bench, steps=1, first=2) + list(bench.model.state_dict().values())


@case()
def data_replaced(bench: Bench) -> Outcome:
    losses = train(bench, steps=1)
    for parameter in bench.model.parameters():
        parameter.data = parameter.data * 0.9
    return losses + train(bench, steps=1, first=1)


@case()
def a_hook_on_a_parameter(bench: Bench) -> Outcome:
    bench.model.transformer.wpe.weight.register_hook(lambda gradient: gradient * 0)
    return train(bench)


@case()
def a_hook_after_accumulation_on_a_parameter(bench: Bench) -> Outcome:
    seen: list[torch.Tensor] = []
    weight = bench.model.transformer.wpe.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    losses = train(bench)
    assert len(seen) == 3
    return losses + seen


@case()
def a_copy_of_the_state_between_steps(bench: Bench) -> Outcome:
    losses = train(bench, steps=1)
    return losses + list(copy.deepcopy(dict(bench.model.state_dict())).values())
