"""One real microbatch, for a model whose forward needs numbers, which a dry run does not have.

It is watched as a dry run is, and its seconds come from the same speeds, so both give the same figures. Saved tensors
leave at once: their bytes are on the host until they are read. The microbatch runs on the model's own parameters, and
on copies of its buffers and of the example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hydra_ext.heads.calls import Heads
from hydra_ext.profile.cards import Speed
from hydra_ext.profile.dry_run import costs_on, device_of, dtype_of
from hydra_ext.profile.figures import Profile
from hydra_ext.profile.form import profile_of
from hydra_ext.profile.microbatch import in_rows, random_state_kept, run_microbatch
from hydra_ext.profile.replacing import Replacements, replaced
from hydra_ext.profile.watch import Elsewhere, Place, Watch
from hydra_ext.state.arguments import tensors_in
from hydra_ext.state.composites import Composite, inner_tensors
from hydra_ext.state.memory import Undo, storage_key
from hydra_ext.state.snapshot import Snapshot

Example = TypeVar("Example")


def real_run(
    model: nn.Module,
    example: Example,
    fn: Callable[[Example], Any],
    *,
    param_dtype: torch.dtype | None = None,
    speed: Speed | None = None,
    heads: Heads | None = None,
) -> Profile:
    """What one microbatch costs, from its forward and backward on the model's device.

    Parameters, gradients, buffers, what modules hold, the example and the random state stay as they are, also if
    ``fn`` raises. What ``fn`` does elsewhere is done once.

    Args:
        model: Any module that :func:`hydra_ext.profile.dry_run` takes, with numbers.
        example: One microbatch, with numbers.
        fn: As in ``run.step``.
        param_dtype: Dtype in which floating parameters compute; by default their own.
        speed, heads: As in a dry run.
    """
    place = device_of(model, None)
    cost = costs_on(place, param_dtype or dtype_of(model), speed)
    before = Snapshot(model, example)
    undo = Undo()
    own = {storage_key(tensor) for tensor in (*model.parameters(), *before.tensors)}

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable:
            for tensor in tensors_in((args, kwargs)):
                if storage_key(tensor) in own:
                    undo.before_write(tensor)
        return func(*args, **kwargs)

    watch = Watch(cost, run=run, tensor_on=_tensor_on, elsewhere=_OnTheHost())
    try:
        with on_doubles(model, example, param_dtype=param_dtype) as given, in_rows(heads):
            run_microbatch(watch, model, given, fn)
    finally:
        undo.restore()
        before.restore()
    return profile_of(model, watch, param_dtype)


@contextmanager
def on_doubles(
    model: nn.Module, example: Example, *, param_dtype: torch.dtype | None = None
) -> Iterator[list[Example]]:
    """A context in which the model is on other tensors of the same numbers; gives such an example, in a list.

    The list may be emptied, to free it. Parameters share the memory of the model's. The random state is kept.
    """
    place = device_of(model, None)
    with random_state_kept(place), replaced(model, _Doubles(place, param_dtype)):
        yield [_Doubles(place, None).of_value(example)]


def has_numbers(model: nn.Module, example: Any) -> bool:
    """Whether no tensor of theirs is on meta, or fake."""
    from torch._subclasses.fake_tensor import FakeTensor

    tensors = [*model.parameters(), *model.buffers(), *tensors_in(example)]
    return not any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors)


class _Doubles(Replacements):
    """Parameters with the memory of the model's, and without their hooks and gradients; copies of other tensors."""

    def __init__(self, device: torch.device, param_dtype: torch.dtype | None) -> None:
        super().__init__()
        self._device = device
        self._param_dtype = param_dtype

    def make(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            data = tensor.data  # has versions of its own
            if self._param_dtype is not None and data.is_floating_point():
                data = data.to(self._param_dtype)
            made: Tensor = nn.Parameter(data, requires_grad=tensor.requires_grad)
            inner = inner_tensors(tensor)
            if [*inner] == [""] or "" not in inner:
                return made
            others = {id(each): each for each in inner.values()} | {id(tensor): made}
            return Composite("", tensor, inner).around(others)
        data = tensor.detach()
        made = data.clone() if _has_no_plain_storage(data) else _copied(data)
        return made.to(self._device).requires_grad_(tensor.requires_grad)


class _OnTheHost(Elsewhere):
    def take(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        taken = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
        taken.copy_(storage)
        return taken

    def bring(self, storage: torch.UntypedStorage, taken: torch.UntypedStorage) -> None:
        storage.copy_(taken)


def _copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides, on no more memory than these span."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    flat = tensor.as_strided((span if tensor.numel() else 0,), (1,)).clone()
    return _tensor_on(flat.untyped_storage(), tensor.dtype, (0, tensor.size(), tensor.stride()))


def _has_no_plain_storage(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg()


def _tensor_on(storage: Any, dtype: torch.dtype, place: Place) -> Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
