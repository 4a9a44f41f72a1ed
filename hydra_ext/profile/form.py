"""Fills the form of a profile with what was watched in one microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.blocks import Layout, discover
from hydra_ext.profile.call_log import Call, amount
from hydra_ext.profile.figures import BlockFigures, ModuleFigures, Peaks, Profile
from hydra_ext.profile.timeline import Part
from hydra_ext.profile.watch import Watch

_BLOCKS_PER_MODEL = 16  # as offload cuts it, where the budget does not ask for smaller ones


def profile_of(model: nn.Module, watch: Watch, param_dtype: torch.dtype | None) -> Profile:
    """The figures of a model whose microbatch has run under the watch."""
    calls = watch.log.calls
    modules = list(model.named_modules())
    of_module: list[list[int]] = [[] for _ in modules]
    for number, call in enumerate(calls):
        of_module[call.module].append(number)
    parked = watch.timeline.at_begin(without=watch.gradients)
    most = _Most(calls, watch.timeline.most(without=watch.gradients))
    with_gradients = _Most(calls, watch.timeline.most(without=()))
    for number in range(len(calls) - 1, 0, -1):  # calls inside a call have higher numbers
        for way in (0, 1):
            calls[calls[number].parent].seconds[way] += calls[number].seconds[way]
    figures = {}
    for (name, module), numbers in zip(modules, of_module, strict=True):
        whole = numbers if name else [0]
        own = [calls[number] for number in whole]
        called = len(numbers) - (not name)
        figures[name] = ModuleFigures(
            name=name,
            order=numbers[-called] if called else 0,
            calls=called,
            forward_seconds=sum(call.seconds[0] for call in own),
            saved=amount((call.fresh for call in own), (call.saved for call in own)),
            inputs=amount(
                (calls[number].fresh_inputs for number in numbers), (calls[number].inputs for number in numbers)
            ),
            parked_bytes=max((parked.get(number, 0) for number in numbers), default=0),
            forward_bytes=most.of(whole, is_backward=False),
            backward_bytes=most.of(whole, is_backward=True),
            live_gradient_bytes=with_gradients.of(whole, is_backward=True) - most.of(whole, is_backward=True),
            own=Peaks(
                forward_bytes=most.of(numbers, is_backward=False, alone=True),
                backward_bytes=most.of(numbers, is_backward=True, alone=True),
                live_gradient_bytes=with_gradients.of(numbers, is_backward=True, alone=True)
                - most.of(numbers, is_backward=True, alone=True),
            ),
            is_repeatable=called == 1 and _is_repeatable(module, [calls[number] for number in numbers]),
        )
    forward, backward = calls[0].seconds
    weights = sum(_bytes(parameter, param_dtype) for parameter in model.parameters())
    layout = discover(model, largest_bytes=weights // _BLOCKS_PER_MODEL)
    return Profile(
        modules=figures,
        blocks=_blocks(layout, param_dtype),
        sites={site.name: site.blocks for site in layout.sites},
        backward_ratio=backward / forward if forward else 2.0,
    )


class _Most:
    """The most bytes alive at once in calls: with the calls inside, or alone."""

    def __init__(self, calls: Sequence[Call], alive: Mapping[Part, int]) -> None:
        self._alone = [[alive.get(Part(number, way), 0) for way in (False, True)] for number in range(len(calls))]
        self._whole = [list(each) for each in self._alone]
        for number in range(len(calls) - 1, 0, -1):  # calls inside a call have higher numbers
            above = self._whole[calls[number].parent]
            above[:] = map(max, above, self._whole[number])

    def of(self, numbers: Iterable[int], *, is_backward: bool, alone: bool = False) -> int:
        each = self._alone if alone else self._whole
        return max((each[number][is_backward] for number in numbers), default=0)


def _is_repeatable(module: nn.Module, calls: list[Call]) -> bool:
    return not any(call.writes for call in calls) and not any(_has_hooks(inner) for inner in module.modules())


def _has_hooks(module: nn.Module) -> bool:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return any(not (getattr(hook, "__module__", None) or type(hook).__module__).startswith("torch.") for hook in hooks)


def _blocks(layout: Layout, param_dtype: torch.dtype | None) -> tuple[BlockFigures, ...]:
    page = _C.PAGE_ALIGNMENT
    return tuple(
        BlockFigures(
            name=block.name,
            weight_bytes=sum(-(-_bytes(p, param_dtype) // page) * page for _, p in block.parameters),
            gradient_bytes=sum(_bytes(p, param_dtype) for _, p in block.parameters if p.requires_grad),
        )
        for block in layout.blocks
    )


def _bytes(parameter: Tensor, param_dtype: torch.dtype | None) -> int:
    itemsize = param_dtype.itemsize if param_dtype and parameter.is_floating_point() else parameter.itemsize
    return parameter.numel() * itemsize
