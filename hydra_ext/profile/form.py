"""Fills the form of a profile with what was watched in one microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hydra_ext import _C
from hydra_ext.blocks import Layout, discover
from hydra_ext.calls import calls_in_turn, has_forward_hooks_of_user, same_modules
from hydra_ext.profile.call_log import UNKNOWN, Call, amount
from hydra_ext.profile.figures import BlockFigures, Chain, Link, ModuleFigures, Peaks, Profile
from hydra_ext.profile.timeline import Part
from hydra_ext.profile.watch import Watch
from hydra_ext.state.composites import inner_tensors

_BLOCKS_PER_MODEL = 16  # as offload cuts it, where the budget does not ask for smaller ones


def profile_of(model: nn.Module, watch: Watch, param_dtype: torch.dtype | None) -> Profile:
    """The figures of a model whose microbatch has run under the watch."""
    form = _Form(model, watch)
    forward, backward = watch.log.calls[0].seconds
    inner = (tensor for parameter in model.parameters() for tensor in inner_tensors(parameter).values())
    weights = sum(_bytes(tensor, param_dtype) for tensor in inner)
    layout = discover(model, largest_bytes=weights // _BLOCKS_PER_MODEL)
    return Profile(
        modules=form.figures(),
        blocks=_blocks(layout, param_dtype),
        sites={site.name: site.blocks for site in layout.sites},
        backward_ratio=backward / forward if forward else 2.0,
        chains=form.chains(),
    )


class _Form:
    """Adds up what calls have cost, the calls inside them included."""

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        self._calls = calls = watch.log.calls
        self._modules = list(model.named_modules())
        self._of_module: list[list[int]] = [[] for _ in self._modules]
        self._inside: list[list[int]] = [[] for _ in calls]  # directly
        for number, call in enumerate(calls):
            self._of_module[call.module].append(number)
            if number:
                self._inside[call.parent].append(number)
        self._parked = watch.timeline.at_begin(without=watch.gradients)
        self._most = _Most(calls, watch.timeline.most(without=watch.gradients))
        self._with_gradients = _Most(calls, watch.timeline.most(without=()))
        for number in range(len(calls) - 1, 0, -1):  # calls inside a call have higher numbers
            for way in (0, 1):
                calls[calls[number].parent].seconds[way] += calls[number].seconds[way]

    def figures(self) -> dict[str, ModuleFigures]:
        return {
            name: self._figures_of(name, module, numbers)
            for (name, module), numbers in zip(self._modules, self._of_module, strict=True)
        }

    def chains(self) -> dict[str, Chain]:
        found = {}
        for (name, module), numbers in zip(self._modules, self._of_module, strict=True):
            if len(numbers) - (not name) == 1 and calls_in_turn(module):
                inside = self._inside[numbers[-1]]
                called = [self._modules[self._calls[each].module][1] for each in inside]
                if same_modules(called, module._modules.values()):
                    found[name] = Chain(name=name, links=[self._link(inside, at) for at in range(len(inside))])
        return found

    def _link(self, inside: list[int], at: int) -> Link:
        call = self._calls[inside[at]]
        name, module = self._modules[call.module]
        given = {storage for storage, _ in call.inputs} | {UNKNOWN}
        writes = (number for number in range(at, len(inside)) if self._calls[inside[number]].writes & given)
        return Link(
            figures=replace(
                self._figures_of(name, module, [inside[at]]), is_repeatable=not has_forward_hooks_of_user(module)
            ),
            fresh=call.fresh,
            saved=call.saved,
            inputs=call.inputs,
            intact_until=next(writes, len(inside)),
        )

    def _figures_of(self, name: str, module: nn.Module, numbers: list[int]) -> ModuleFigures:
        """``numbers``: of the module's calls."""
        calls, most, with_gradients = self._calls, self._most, self._with_gradients
        whole = numbers if name else [0]
        own = [calls[number] for number in whole]
        called = len(numbers) - (not name)
        return ModuleFigures(
            name=name,
            order=numbers[-called] if called else 0,
            calls=called,
            forward_seconds=sum(call.seconds[0] for call in own),
            again_seconds=own[0].again if len(own) == 1 else None,
            saved=amount((call.fresh for call in own), (call.saved for call in own)),
            inputs=amount(
                (calls[number].fresh_inputs for number in numbers), (calls[number].inputs for number in numbers)
            ),
            parked_bytes=max((self._parked.get(number, 0) for number in numbers), default=0),
            forward_bytes=most.of(whole, is_backward=False),
            backward_bytes=most.of(whole, is_backward=True),
            live_gradient_bytes=with_gradients.of(whole, is_backward=True) - most.of(whole, is_backward=True),
            own=Peaks(
                forward_bytes=most.of(numbers, is_backward=False, alone=True),
                backward_bytes=most.of(numbers, is_backward=True, alone=True),
                live_gradient_bytes=with_gradients.of(numbers, is_backward=True, alone=True)
                - most.of(numbers, is_backward=True, alone=True),
            ),
            is_repeatable=called == 1
            and not has_forward_hooks_of_user(module)
            and not any(calls[number].writes for number in numbers),
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
