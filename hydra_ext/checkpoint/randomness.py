"""The random states of a process: torch's on the CPU and on one device, Python's, and numpy's legacy generator."""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from hydra_ext.errors import UnsupportedState

_WORDS = 624  # words in the state of a Mersenne twister
_KNOWN = "MT19937"


class BadRandomness(ValueError):
    """The message says why."""


def capture(device: torch.device) -> dict[str, Any]:
    """The random states as JSON. ``device`` is where the forward runs.

    Raises:
        UnsupportedState: numpy's global generator was replaced by one of another kind.
    """
    version, words, gauss = random.getstate()
    legacy: Any = numpy.random.get_state(legacy=False)
    if legacy["bit_generator"] != _KNOWN:
        raise UnsupportedState(
            f"numpy's global generator was replaced by a {legacy['bit_generator']}, whose state cannot be saved: use "
            "numpy.random.default_rng() for generators of your own"
        )
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state(device).numpy().tobytes().hex() if device.type == "cuda" else None,
        "python": {"version": version, "words": _hex(words[:_WORDS]), "position": words[_WORDS], "gauss": gauss},
        "numpy": {
            "words": _hex(legacy["state"]["key"].tolist()),
            "position": int(legacy["state"]["pos"]),
            "has_gauss": int(legacy["has_gauss"]),
            "gauss": float(legacy["gauss"]),
        },
    }


def _hex(words: Any) -> str:
    return struct.pack(f"<{_WORDS}I", *words).hex()


@dataclass(frozen=True)
class Randomness:
    """Random states that have been checked, for :meth:`restore`."""

    torch_state: torch.Tensor
    cuda_state: torch.Tensor | None
    python_state: tuple[Any, ...]
    numpy_state: dict[str, Any]

    @staticmethod
    def of(content: Any) -> Randomness:
        """Checks and decodes saved states.

        Raises:
            BadRandomness: The value is not what :func:`capture` returns.
        """
        try:
            python, legacy = content["python"], content["numpy"]
            cuda = content["cuda"]
            known = Randomness(
                _state(content["torch"]),
                None if cuda is None else _state(cuda),
                (python["version"], (*_words(python), _position(python)), python["gauss"]),
                {
                    "bit_generator": _KNOWN,
                    "state": {"key": numpy.array(_words(legacy), dtype=numpy.uint32), "pos": _position(legacy)},
                    "has_gauss": int(legacy["has_gauss"]),
                    "gauss": float(legacy["gauss"]),
                },
            )
            # Each library checks a state when it sets it; these generators are used for nothing else.
            torch.Generator().set_state(known.torch_state)
            random.Random().setstate(known.python_state)
            numpy.random.RandomState().set_state(known.numpy_state)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError, struct.error) as error:
            raise BadRandomness(f"the random states cannot be read: {error!r:.200}") from error
        return known

    def restore(self, device: torch.device) -> bool:
        """Restores the states. Returns False if the device has a generator and its state was not saved."""
        torch.set_rng_state(self.torch_state)
        random.setstate(self.python_state)
        numpy.random.set_state(self.numpy_state)
        if device.type != "cuda":
            return True
        if self.cuda_state is not None:
            torch.cuda.set_rng_state(self.cuda_state, device)
        return self.cuda_state is not None


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)


def _words(content: Mapping[str, Any]) -> tuple[int, ...]:
    return struct.unpack(f"<{_WORDS}I", bytes.fromhex(content["words"]))


def _position(content: Mapping[str, Any]) -> int:
    position = content["position"]
    if type(position) is not int or not 0 <= position <= _WORDS:
        raise ValueError(f"{position!r:.40} is not a position among {_WORDS} words")
    return position
