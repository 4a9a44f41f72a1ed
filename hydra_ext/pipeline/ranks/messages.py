"""Messages between ranks: a header that says what comes, then the tensors' memory.

A header is one tensor of ``HEADER_WORDS`` int64, with a second one of the length that the first names where that is
not enough. A tensor travels as the bytes of its memory, in its order there, and is laid out where it arrives as it was
where it came from: results may depend on that to the last bit. Gaps do not travel, and what is one element in several
places (an expanded gradient) travels once.
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
_NO_NORM = -1  # as a float64's bits it is no number that arithmetic gives
_PREFIX = 9  # words before those of the tensors


@dataclass(frozen=True)
class Message:
    """What one stage hands to another for one microbatch, or one rank to another for one batch.

    Attributes:
        batch: which, counted from 0.
        microbatch: in the batch; -1 for what belongs to all of them.
        count: of microbatches in the batch.
        tensors: None where there is none, as for a gradient that did not come.
        requires_grad: of each tensor.
        structure: text that says what the tensors are.
        max_norm: that the sender was given for the batch.
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
    """What comes after a header."""

    batch: int
    microbatch: int
    count: int
    fingerprint: int  # of the structure's text
    structure_bytes: int  # of the text, if it follows; else both sides have it from before
    tensors: tuple[Layout | None, ...]
    requires_grad: tuple[bool, ...]
    max_norm: float | None = None

    @property
    def nbytes(self) -> int:
        """That cross, of tensors."""
        return sum(each.packed.nbytes for each in self.tensors if each is not None)


END = Header(-1, -1, 0, 0, 0, (), ())  # nothing comes after it


def fingerprint(structure: str) -> int:
    """63 bits of it."""
    return int.from_bytes(hashlib.blake2b(structure.encode(), digest_size=8).digest(), "little") >> 1


def norm_word(max_norm: float | None) -> int:
    """A ``max_norm`` as a word: others have other words."""
    word: int = _NO_NORM if max_norm is None else struct.unpack("<q", struct.pack("<d", max_norm))[0]
    return word


def _norm_of(word: int) -> float | None:
    if word == _NO_NORM:
        return None
    norm: float = struct.unpack("<d", struct.pack("<q", word))[0]
    return norm


def layout_of(tensor: Tensor) -> Layout:
    """How a tensor is laid out where it arrives.

    Raises:
        UnsupportedModel: it is of a layout or dtype that cannot be sent.
    """
    if tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
        raise UnsupportedModel(
            f"a {tensor.layout} tensor of {tensor.dtype} would have to cross from one stage to another: only dense "
            "tensors of torch's usual dtypes can"
        )
    return Layout.of(tensor)


def packed(tensor: Tensor, layout: Layout) -> Tensor:
    """The tensor without a graph; a copy where its memory has gaps.

    Args:
        layout: its own.
    """
    if tensor.is_conj() or tensor.is_neg() or layout.packed.stride != tensor.stride():
        return layout.packed.copy(tensor)
    return tensor.detach()


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous or :func:`packed` tensor; no copy."""
    return memory(tensor).view(torch.uint8)


def laid_out(tensor: Tensor, layout: Layout, device: torch.device) -> Tensor:
    """A :func:`packed` tensor that has arrived, as the sender's was."""
    is_so = layout.packed is layout and tensor.device.type == device.type
    return tensor if is_so else layout.copy(tensor, device)


def encode(message: Message, layouts: Sequence[Layout | None], *, with_structure: bool) -> list[Tensor]:
    """The header of a message whose tensors are laid out so: one int64 tensor, or two."""
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
    """The header after which nothing comes."""
    return torch.tensor(
        [_MAGIC, -1, -1, 0, _NO_NORM, 0, 0, 0, _PREFIX] + [0] * (HEADER_WORDS - _PREFIX),
        dtype=torch.int64,
        device="cpu",
    )


def words_left(first: Tensor) -> int:
    """How many words of the header come in a second tensor.

    Raises:
        ValueError: this is no header.
    """
    if int(first[0]) != _MAGIC:
        raise ValueError("what arrived is no header: the ranks do not run the same version of hydra_ext")
    return max(0, int(first[_PREFIX - 1]) - HEADER_WORDS)


def decode(words: Sequence[int]) -> Header:
    """What a whole header says."""
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
    """A text, to be sent."""
    data = text.encode()
    padded = data + bytes(-len(data) % 8)
    return torch.frombuffer(bytearray(padded), dtype=torch.int64)


def as_text(words: Tensor, size: int) -> str:
    """Of so many bytes."""
    return words.numpy().tobytes()[:size].decode()
