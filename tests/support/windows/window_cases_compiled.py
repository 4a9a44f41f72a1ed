"""Models compiled wholly or by blocks, before the context and inside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from support.benches import Bench, Case, Outcome
from support.windows.window_cases import case_of, train
from support.windows.window_subjects import hidden, language_loss

CASES: list[Case] = []
case = case_of(CASES)


def compiled_whole(bench: Bench, backend: str) -> Outcome:
    torch._dynamo.reset()
    compiled = torch.compile(bench.model, backend=backend)
    return train(bench, lambda _model, index: language_loss(compiled, index))


@case(keeps_bytes=True)
def the_whole_model_compiled_eagerly(bench: Bench) -> Outcome:
    return compiled_whole(bench, "eager")


@case(keeps_bytes=True, passes=3)
def the_whole_model_compiled_ahead_of_time(bench: Bench) -> Outcome:
    return compiled_whole(bench, "aot_eager")


def compile_blocks(models: Sequence[nn.Module]) -> None:
    torch._dynamo.reset()
    for block in models[0].transformer.h:
        block.compile(backend="aot_eager")


@case(keeps_bytes=True, prepare=compile_blocks)
def blocks_compiled_in_place(bench: Bench) -> Outcome:
    return train(bench)


@case(keeps_bytes=True, prepare=compile_blocks)
def blocks_compiled_in_place_and_called_directly(bench: Bench) -> Outcome:
    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        x = hidden(index)
        for block in model.transformer.h:
            x = block(x)
        return x.pow(2).mean()

    return train(bench, loss_of)


@case(keeps_bytes=True)
def blocks_compiled_inside_the_context(bench: Bench) -> Outcome:
    compile_blocks(bench.models)
    return train(bench)


def replace_by_compiled(models: Sequence[nn.Module]) -> None:
    torch._dynamo.reset()
    blocks = models[0].transformer.h
    for index in range(len(blocks)):
        blocks[index] = torch.compile(blocks[index], backend="aot_eager")


@case(keeps_bytes=True, prepare=replace_by_compiled)
def blocks_replaced_by_compiled_ones(bench: Bench) -> Outcome:
    return train(bench)
