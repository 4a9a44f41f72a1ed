"""Messages between ranks: a prologue of a fixed size, then the tensors' memory. A new form is described in between.

The *form* of a message is all that messages of one kind have in common: the layouts of its tensors, which of them
require gradients, and the structure's text. Both ends of a link number the forms that they see. The prologue names the
form by its number. A description follows it only where the form is new; the prologue then says how long it is. What
may differ from message to message is in the prologue itself, so that the receiver can compare it with its own.

A tensor is sent as the bytes of its memory, in memory order. At the receiver it gets the sender's layout, since results
may depend on the layout to the last bit. Gaps are not sent. An element in several places (of an expanded gradient) is
sent once.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hydra_ext.errors import UnsupportedModel
from hydra_ext.state.layout import ALIGNMENT, Layout, memory

_PROLOGUE = struct.Struct("=7q")
PROLOGUE_WORDS = _PROLOGUE.size // 8
_MAGIC = 0x68796472615F3200  # "hydra_2"
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_PRESENT, _REQUIRES_GRAD, _LEAD = 1, 2, 4
_WORD = 8  # bytes
_NO_NORM = -1  # the bits of a NaN that arithmetic does not give
_NO_FORM = -1  # of the prologue that ends a link


@dataclass(frozen=True)
class Message:
    """A message from one stage to another for one microbatch, or from one rank to another for one batch.

    Attributes:
        batch: Number of the batch, from 0. An evaluation has one below -1.
        microbatch: Number of the microbatch in the batch; -1 for a message about all of them.
        count: Number of microbatches in the batch.
        tensors: The tensors; None in place of a gradient that a backward has not made.
        requires_grad: Whether each tensor requires a gradient; empty if none does.
        structure: Text from which the receiver puts the tensors together.
        max_norm: The ``max_norm`` that the sender was given for the batch.
    """

    batch: int
    microbatch: int
    count: int
    tensors: tuple[Tensor | None, ...]
    requires_grad: tuple[bool, ...] = ()
    structure: str = ""
    max_norm: float | None = None


@dataclass(frozen=True)
class Form:
    """What messages of one kind have in common.

    Attributes:
        layouts: The layouts of the tensors; None where there is no tensor.
        requires_grad: Whether each tensor requires a gradient.
        structure: The structure's text.
    """

    layouts: tuple[Layout | None, ...]
    requires_grad: tuple[bool, ...]
    structure: str

    @cached_property
    def present(self) -> tuple[Layout, ...]:
        """The layouts of the tensors that there are."""
        return tuple(layout for layout in self.layouts if layout is not None)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of tensors that are sent."""
        return sum(layout.packed.nbytes for layout in self.present)


@dataclass(frozen=True)
class Prologue:
    """The beginning of a message: what may differ from the message before.

    Attributes:
        form: Number of the form; None at the end of a link, where no message follows.
        words: Words of the form's description, which follow; 0 if both ends have it from an earlier message.
    """

    form: int | None
    words: int
    batch: int
    microbatch: int
    count: int
    max_norm: float | None

    def encode(self) -> Tensor:
        form = _NO_FORM if self.form is None else self.form
        norm = norm_word(self.max_norm)
        words = _PROLOGUE.pack(_MAGIC, form, self.words, self.batch, self.microbatch, self.count, norm)
        return torch.frombuffer(bytearray(words), dtype=torch.int64)

    @staticmethod
    def decode(received: Tensor) -> Prologue:
        """
        Raises:
            ValueError: This is no prologue.
        """
        magic, form, words, batch, microbatch, count, norm = received.tolist()
        if magic != _MAGIC:
            raise ValueError("what arrived is no message: the ranks do not run the same version of hydra_ext")
        return Prologue(None if form == _NO_FORM else form, words, batch, microbatch, count, _norm_of(norm))

    def message(self, tensors: tuple[Tensor | None, ...], form: Form) -> Message:
        """The message that has arrived."""
        numbers = self.batch, self.microbatch, self.count
        return Message(*numbers, tensors, form.requires_grad, form.structure, self.max_norm)


@dataclass(frozen=True)
class NumberedForm:
    """A form, and its number on a link."""

    number: int
    form: Form

    def prologue(self, message: Message, words: int) -> Prologue:
        """The prologue of a message of this form, whose description takes so many words; 0 if none follows."""
        return Prologue(self.number, words, message.batch, message.microbatch, message.count, message.max_norm)


END = Prologue(None, 0, -1, -1, 0, None)  # no message follows


def fingerprint(structure: str) -> int:
    """A hash of 63 bits of a text."""
    return int.from_bytes(hashlib.blake2b(structure.encode(), digest_size=8).digest(), "little") >> 1


def norm_word(max_norm: float | None) -> int:
    """A ``max_norm`` as a word. Different values have different words."""
    word: int = _NO_NORM if max_norm is None else struct.unpack("<q", struct.pack("<d", max_norm))[0]
    return word


def _norm_of(word: int) -> float | None:
    if word == _NO_NORM:
        return None
    norm: float = struct.unpack("<d", struct.pack("<q", word))[0]
    return norm


def form_key(message: Message) -> tuple[object, ...]:
    """A key that is equal for messages of one form. It takes less time than the form itself.

    Raises:
        UnsupportedModel: A tensor of this layout cannot be sent.
    """
    for tensor in message.tensors:
        if tensor is not None and tensor.layout != torch.strided:
            layout_of(tensor)  # which refuses it
    places = tuple(
        None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % ALIGNMENT)
        for tensor in message.tensors
    )
    return places, message.requires_grad, message.structure


def form_of(message: Message) -> Form:
    """
    Raises:
        UnsupportedModel: A tensor of this layout or dtype cannot be sent.
    """
    layouts = tuple(None if tensor is None else layout_of(tensor) for tensor in message.tensors)
    return Form(layouts, message.requires_grad or (False,) * len(layouts), message.structure)


def layout_of(tensor: Tensor) -> Layout:
    """The layout that a tensor has at the receiver.

    Raises:
        UnsupportedModel: A tensor of this layout or dtype cannot be sent.
    """
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
        raise UnsupportedModel(
            f"a {tensor.layout} tensor of {tensor.dtype} would have to cross from one stage to another: only dense "
            "tensors of torch's usual dtypes can"
        )
    return Layout.of(tensor)


def packed(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor without a graph; a copy if its memory has gaps, or if it is a conjugate or negative view.

    Args:
        layout: The tensor's layout.
    """
    if tensor.is_conj() or tensor.is_neg() or layout.packed.stride != tensor.stride():
        return layout.packed.copy(tensor)
    return tensor.detach() if tensor.requires_grad else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of the memory of a contiguous or :func:`packed` tensor."""
    return memory(tensor).view(torch.uint8)


def laid_out(tensor: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """A received :func:`packed` tensor in the sender's layout, on ``device``."""
    is_so = layout.packed is layout and tensor.device.type == device.type
    return tensor if is_so else layout.copy(tensor, device)


def describe(form: Form) -> Tensor:
    """A form's description, as words."""
    text = form.structure.encode()
    words = [len(form.layouts), len(text)]
    for layout, requires_grad in zip(form.layouts, form.requires_grad, strict=True):
        if layout is None:
            words.append(_REQUIRES_GRAD * requires_grad)
            continue
        words.append(_PRESENT + _REQUIRES_GRAD * requires_grad + _LEAD * layout.lead)
        words += [_DTYPES.index(layout.dtype), len(layout.size), *layout.size, *layout.stride]
    padded = text + bytes(-len(text) % _WORD)
    words += struct.unpack(f"={len(padded) // _WORD}q", padded)
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def described(description: Tensor) -> Form:
    """The form of a description."""
    words = description.tolist()
    count, length = words[:2]
    place = 2
    layouts: list[Layout | None] = []
    requires_grad = []
    for _ in range(count):
        flags = words[place]
        place += 1
        requires_grad.append(bool(flags & _REQUIRES_GRAD))
        if not flags & _PRESENT:
            layouts.append(None)
            continue
        dtype, dims = words[place : place + 2]
        place += 2
        size, stride = tuple(words[place : place + dims]), tuple(words[place + dims : place + 2 * dims])
        place += 2 * dims
        layouts.append(Layout(_DTYPES[dtype], size, stride, flags // _LEAD))
    text = struct.pack(f"={len(words) - place}q", *words[place:])[:length].decode()
    return Form(tuple(layouts), tuple(requires_grad), text)
