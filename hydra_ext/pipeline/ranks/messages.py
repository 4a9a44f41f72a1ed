"""Messages between ranks: a header that describes the tensors, then the tensors' memory.

A header is one tensor of ``HEADER_WORDS`` int64. If that is not enough, a second one follows, whose length the first
one names. A tensor is sent as the bytes of its memory, in memory order. At the receiver it gets the sender's layout,
since results may depend on the layout to the last bit. Gaps are not sent. An element in several places (of an expanded
gradient) is sent once.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hydra_ext.errors import UnsupportedModel
from hydra_ext.state.layout import Layout, memory

HEADER_WORDS = 64
_MAGIC = 0x68796472615F3100  # "hydra_1", then the kind
_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip
_PRESENT, _REQUIRES_GRAD, _LEAD = 1, 2, 4
_NO_NORM = -1  # the bits of a NaN that arithmetic does not give
_PREFIX = 9  # words before those of the tensors


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
class Header:
    """The content of a header: it describes the tensors that follow."""

    batch: int
    microbatch: int
    count: int
    fingerprint: int  # of the structure's text
    structure_bytes: int  # of the text, if it follows; 0 if both sides have it from an earlier message
    tensors: tuple[Layout | None, ...]
    requires_grad: tuple[bool, ...]
    max_norm: float | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that follow."""
        return sum(each.packed.nbytes for each in self.tensors if each is not None)


END = Header(-1, -1, 0, 0, 0, (), ())  # no message follows


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
    return tensor.detach()


def as_bytes(tensor: Tensor) -> Tensor:
    """A view of the memory of a contiguous or :func:`packed` tensor."""
    return memory(tensor).view(torch.uint8)


def laid_out(tensor: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """A received :func:`packed` tensor in the sender's layout, on ``device``."""
    is_so = layout.packed is layout and tensor.device.type == device.type
    return tensor if is_so else layout.copy(tensor, device)


def encode(message: Message, layouts: Sequence[Layout | None], *, with_structure: bool) -> list[Tensor]:
    """The header of a message: one int64 tensor, or two.

    Args:
        layouts: The layouts of the message's tensors; None where there is no tensor.
        with_structure: Whether the structure's text follows.
    """
    text = message.structure.encode() if with_structure else b""
    words = [_MAGIC, message.batch, message.microbatch, message.count, norm_word(message.max_norm)]
    words += [fingerprint(message.structure), len(text), len(layouts), 0]
    flags = message.requires_grad or (False,) * len(layouts)
    for layout, requires_grad in zip(layouts, flags, strict=True):
        if layout is None:
            words.append(0)
            continue
        words.append(_PRESENT + _REQUIRES_GRAD * requires_grad + _LEAD * layout.lead)
        words += [_DTYPES.index(layout.dtype), len(layout.size), *layout.size, *layout.stride]
    words[_PREFIX - 1] = len(words)
    first, rest = words[:HEADER_WORDS], words[HEADER_WORDS:]
    first += [0] * (HEADER_WORDS - len(first))
    return [torch.tensor(part, dtype=torch.int64, device="cpu") for part in (first, rest) if part]


def end_of_messages() -> Tensor:
    """The header that ends a link: no message follows."""
    return torch.tensor(
        [_MAGIC, -1, -1, 0, _NO_NORM, 0, 0, 0, _PREFIX] + [0] * (HEADER_WORDS - _PREFIX),
        dtype=torch.int64,
        device="cpu",
    )


def words_left(first: Tensor) -> int:
    """How many words of the header a second tensor has.

    Raises:
        ValueError: This is no header.
    """
    if int(first[0]) != _MAGIC:
        raise ValueError("what arrived is no header: the ranks do not run the same version of hydra_ext")
    return max(0, int(first[_PREFIX - 1]) - HEADER_WORDS)


def decode(words: Sequence[int]) -> Header:
    """The content of a whole header."""
    batch, microbatch, of_batch, norm, known, structure_bytes, count = words[1:8]
    place = _PREFIX
    tensors: list[Layout | None] = []
    requires_grad = []
    for _ in range(count):
        flags = words[place]
        place += 1
        requires_grad.append(bool(flags & _REQUIRES_GRAD))
        if not flags & _PRESENT:
            tensors.append(None)
            continue
        dtype, dims = words[place : place + 2]
        place += 2
        size, stride = tuple(words[place : place + dims]), tuple(words[place + dims : place + 2 * dims])
        place += 2 * dims
        tensors.append(Layout(_DTYPES[dtype], size, stride, flags // _LEAD))
    of_all = tuple(tensors), tuple(requires_grad)
    return Header(batch, microbatch, of_batch, known, structure_bytes, *of_all, _norm_of(norm))


def as_words(text: str) -> Tensor:
    """A text as words, filled up with zeros."""
    data = text.encode()
    padded = data + bytes(-len(data) % 8)
    return torch.frombuffer(bytearray(padded), dtype=torch.int64)


def as_text(words: Tensor, size: int) -> str:
    """The text of ``size`` bytes in these words."""
    return words.numpy().tobytes()[:size].decode()
