"""A dry run: one microbatch on fake tensors, which have shapes and no numbers.

It takes no memory and makes no step. Every tensor that is saved for backward leaves at once and comes back when it is
read, so what is alive is what a model needs at least. Memory that a library takes for itself is not seen, such as the
workspaces of convolutions and the notes of recurrent layers; a real step finds it.
"""

from __future__ import annotations

import itertools
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hydra_ext import _C
from hydra_ext.blocks import Layout, discover
from hydra_ext.calls import StandIn, standing_in
from hydra_ext.errors import AlreadyOffloaded, InvalidDevice, NotOnFakeTensors, UnsupportedModel
from hydra_ext.outputs import check_loss, split
from hydra_ext.profile.call_log import Call, amount
from hydra_ext.profile.cards import Speed, speed_of_this_machine
from hydra_ext.profile.fakes import Fakes, on_fakes
from hydra_ext.profile.figures import BlockFigures, ModuleFigures, Profile
from hydra_ext.profile.operators import run_on_fakes, seconds_of
from hydra_ext.profile.timeline import Part
from hydra_ext.profile.watch import Watch
from hydra_ext.state.randomness import RandomState

Example = TypeVar("Example")

_BLOCKS_PER_MODEL = 16  # as offload cuts it, where the budget does not ask for smaller ones
_OF_FAKES = re.compile(r"fake ?tensor|tensor subclasses|data pointer|invalid python storage|meta tensor", re.IGNORECASE)


def dry_run(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    device: torch.device | str | None = None,
    param_dtype: torch.dtype | None = None,
    speed: Speed | None = None,
) -> Profile:
    """What one microbatch costs, from its forward and backward on fake tensors.

    The model, its gradients and the random state stay as they are, also if ``fn`` raises. What ``fn`` does elsewhere is
    done once.

    Args:
        model: Any module, also one on meta.
        example: One microbatch: tensors in any containers. Their numbers are not read.
        fn: As in ``run.step``: returns the loss of ``example``, alone or with metrics.
        device: Where the tensors pretend to be; None for the model's device, or the CPU for a model on meta.
        param_dtype: Dtype in which floating parameters compute; by default their own.
        speed: Of the device; None measures this machine.

    Raises:
        NotOnFakeTensors: ``fn`` needs numbers, which fake tensors do not have.
        InvalidDevice: This build of torch has no such device.
        UnsupportedModel: The model has parameters without shapes.
        AlreadyOffloaded: The model is inside an offload context.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # imports a second's worth of modules

    if any(isinstance(call, StandIn) for module in model.modules() for call in standing_in(module)):
        raise AlreadyOffloaded("the model is inside an offload context: make the dry run before entering it")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise UnsupportedModel(f"'{lazy[0]}' has no shape yet: call the model once, or give it its shape")
    place = device_of(model, device)
    speed = speed or speed_of_this_machine(place, param_dtype or dtype_of(model))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode, place, param_dtype)
    watch = Watch(lambda *operator: seconds_of(operator, speed), run=run_on_fakes, tensor_on=fakes.tensor_on)
    with _random_state_kept(place), on_fakes(model, fakes), _reasons_given():
        watch.exempt([*model.parameters(), *model.buffers()])
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(watch.take_gradient)  # type: ignore[no-untyped-call]
        with _nothing_compiled(), torch.enable_grad(), mode, watch:
            given = [Fakes(mode, place, None).of_value(example)]
            _run(watch, model, given, fn, trained)
    return _profile(model, watch, param_dtype)


def _run(watch: Watch, model: nn.Module, given: list[Any], fn: Callable[[Any], Any], trained: Sequence[Tensor]) -> None:
    """Makes the microbatch. ``given`` has the example, and is emptied, so that nothing here keeps it alive."""
    watch.born(given)
    with saved_tensors_hooks(watch.pack, watch.unpack):
        with watch.watched_calls(model):
            loss, metrics = split(fn(given.pop()))
        check_loss(loss)
        metrics = tree_map_only(Tensor, Tensor.detach, metrics)
        kept, root = loss.detach(), [loss]
        del loss
        watch.begin_backward()
        torch.autograd.backward(root.pop(), inputs=trained)
    del kept, metrics  # alive during backward, as in a step


@contextmanager
def faked(
    model: nn.Module, example: Example, *, device: torch.device, param_dtype: torch.dtype | None = None
) -> Iterator[Example]:
    """A model on fake tensors, for a look at its calls of which only shapes are wanted. Gives a fake of the example.

    Raises:
        NotOnFakeTensors: The body needs numbers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode, device, param_dtype)
    with _random_state_kept(device), on_fakes(model, fakes), _reasons_given(), _nothing_compiled(), mode, _OnFakes():  # type: ignore[no-untyped-call]
        given: Example = Fakes(mode, device, None).of_value(example)
        yield given


class _OnFakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_fakes(func, args, kwargs or {})


def dtype_of(model: nn.Module) -> torch.dtype:
    """Of the first floating parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is None:
        first = next(itertools.chain(model.parameters(), model.buffers()), None)
        place = torch.device("cpu") if first is None or first.is_meta else first.device
    else:
        place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InvalidDevice(
            f"device={str(place)!r}: torch sees no CUDA device here: give 'cpu', where shapes are the same"
        )
    return torch.device("cuda", torch.cuda.current_device()) if str(place) == "cuda" else place


def _nothing_compiled() -> AbstractContextManager[Any]:
    """Compiled code runs as it was before. Where the compiler was not imported, there is none."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    state = RandomState(device)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def _reasons_given() -> Iterator[None]:
    log = logging.getLogger("torch._subclasses.fake_tensor")  # writes the stack of what is raised, too
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except Exception as error:
        if "not linked with support for cuda" in str(error):
            raise InvalidDevice(
                f"fn names a CUDA device{_place_of(error)}, which torch does not see here: leave it out of fn"
            ) from error
        if not _is_of_fakes(error):
            raise
        raise NotOnFakeTensors(
            f"fn cannot run on fake tensors, which have no numbers{_place_of(error)}: {_first_line(error)}. Leave out "
            "of fn what reads numbers, such as .item(), print, numpy, or a choice by a tensor's values, or profile a "
            "real step"
        ) from error
    finally:
        log.disabled = was_disabled


def _is_of_fakes(error: BaseException) -> bool:
    if type(error).__name__ == "FakeTensorDeviceMismatchError":  # a real run would fail as well
        return False
    return type(error).__module__ == "torch._subclasses.fake_tensor" or _OF_FAKES.search(str(error)) is not None


def _place_of(error: BaseException) -> str:
    """The last line outside torch and this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and "/hydra_ext/" not in frame.filename
    ]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


# ---- the form -------------------------------------------------------------------------------------------------------
def _profile(model: nn.Module, watch: Watch, param_dtype: torch.dtype | None) -> Profile:
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
            own_forward_bytes=most.of(numbers, is_backward=False, alone=True),
            own_backward_bytes=most.of(numbers, is_backward=True, alone=True),
            live_gradient_bytes=with_gradients.of(whole, is_backward=True) - most.of(whole, is_backward=True),
            own_live_gradient_bytes=with_gradients.of(numbers, is_backward=True, alone=True)
            - most.of(numbers, is_backward=True, alone=True),
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
