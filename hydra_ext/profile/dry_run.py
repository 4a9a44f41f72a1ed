"""A dry run: one microbatch on fake tensors, which have shapes and no numbers.

It takes no memory and makes no step. Every tensor that is saved for backward leaves at once and comes back when it is
read, so what is alive is what a model needs at least. What a library takes for itself is not seen, such as the notes of
recurrent layers; a real step finds it. The workspaces of convolutions on this machine's CPU count.
"""

from __future__ import annotations

import itertools
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from hydra_ext.calls import StandIn, standing_in
from hydra_ext.errors import AlreadyOffloaded, InvalidDevice, NotOnFakeTensors, UnsupportedModel
from hydra_ext.heads.calls import Heads
from hydra_ext.profile.cards import Speed, speed_of_this_machine
from hydra_ext.profile.fakes import Fakes
from hydra_ext.profile.figures import Profile
from hydra_ext.profile.form import profile_of
from hydra_ext.profile.microbatch import in_rows, nothing_compiled, random_state_kept, run_microbatch
from hydra_ext.profile.operators import run_on_fakes, seconds_of, workspace_of
from hydra_ext.profile.replacing import replaced
from hydra_ext.profile.watch import OperatorCost, Watch
from hydra_ext.state.composites import composites_of

Example = TypeVar("Example")

_OF_FAKES = re.compile(r"fake ?tensor|tensor subclasses|data pointer|invalid python storage|meta tensor", re.IGNORECASE)


def dry_run(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    device: torch.device | str | None = None,
    param_dtype: torch.dtype | None = None,
    speed: Speed | None = None,
    heads: Heads | None = None,
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
        speed: Of the device; None measures this machine. Only then do workspaces count: those of others are not known.
        heads: The model's, which may run in rows; None for plain ones.

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
    _refuse_attributes(model)
    place = device_of(model, device)
    cost = costs_on(place, param_dtype or dtype_of(model), speed)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = Fakes(mode, place, param_dtype)
    watch = Watch(cost, run=run_on_fakes, tensor_on=fakes.tensor_on)
    with random_state_kept(place), replaced(model, fakes), _reasons_given(), in_rows(heads):
        run_microbatch(watch, model, [Fakes(mode, place, None).of_value(example)], fn, mode=mode)
    return profile_of(model, watch, param_dtype)


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
    with random_state_kept(device), replaced(model, fakes), _reasons_given(), nothing_compiled(), mode, _OnFakes():  # type: ignore[no-untyped-call]
        given: Example = Fakes(mode, device, None).of_value(example)
        yield given


class _OnFakes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_on_fakes(func, args, kwargs or {})


def _refuse_attributes(model: nn.Module) -> None:
    for composite in composites_of(model):
        if "" in composite.inner:
            reason = f"'{composite.name}' is a {type(composite.parameter).__name__} with tensors in its attributes"
            raise NotOnFakeTensors(f"the model cannot run on fake tensors: {reason}", reason=reason)


def costs_on(device: torch.device, dtype: torch.dtype, speed: Speed | None) -> OperatorCost:
    """Costs of operators. Workspaces are this machine's CPU's: a speed that is given may be that of another device."""
    has_workspaces = device.type == "cpu" and speed is None
    known = speed or speed_of_this_machine(device, dtype)

    def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[float, int]:
        seconds = seconds_of((func, args, kwargs, out), known)
        return seconds, workspace_of(func, args, out) if has_workspaces else 0

    return cost


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


@contextmanager
def _reasons_given() -> Iterator[None]:
    log = logging.getLogger("torch._subclasses.fake_tensor")  # writes the stack of what is raised, too
    was_disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    except Exception as error:
        if _names_a_missing_device(error):
            raise InvalidDevice(
                f"fn names a CUDA device{_place_of(error)}, which torch does not see here: leave it out of fn"
            ) from error
        if not _is_of_fakes(error):
            raise
        reason = f"{_first_line(error)}{_place_of(error)}"
        raise NotOnFakeTensors(
            f"fn cannot run on fake tensors, which have no numbers: {reason}. Leave out of fn what reads numbers, such "
            "as .item(), print, numpy, or a choice by a tensor's values; or give plan.fit a model and an example with "
            "numbers, of which it profiles a real step",
            reason=reason,
        ) from error
    finally:
        log.disabled = was_disabled


def _names_a_missing_device(error: BaseException) -> bool:
    """Fakes may be made for a device that is not there; then torch refuses them beside others."""
    beside_others = type(error).__name__ == "FakeTensorDeviceMismatchError" and not torch.cuda.is_available()
    return "not linked with support for cuda" in str(error) or (beside_others and "cuda" in str(error))


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
