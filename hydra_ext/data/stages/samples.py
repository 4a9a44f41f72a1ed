"""Datasets as sources, and the function that makes batches of them in workers. Orders are those of DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch.utils.data import RandomSampler, Subset
from torchdata.nodes import BaseNode, IterableWrapper

from hydra_ext.data import places
from hydra_ext.data.places import Place
from hydra_ext.data.stages.ahead import expect_same
from hydra_ext.errors import InvalidArgument

Batch = tuple[int, Any]  # the epoch's seed, and the keys of a batch, or one key


def draw_seed(generator: torch.Generator | None) -> int:
    """As DataLoader draws one at the start of an epoch."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _kept(generator: torch.Generator | None) -> str | None:
    """A generator's state, as JSON has it."""
    return None if generator is None else generator.get_state().numpy().tobytes().hex()


def _put(generator: torch.Generator | None, kept: str | None) -> None:
    if generator is not None and kept is not None:
        generator.set_state(torch.frombuffer(bytearray.fromhex(kept), dtype=torch.uint8))


class Keys(BaseNode[Batch]):
    """The keys of a dataset's batches, epoch by epoch.

    An epoch begins with the draws of DataLoader, from the same generators. So the order is the same, and what else
    draws from them goes on as it would beside a DataLoader.

    Args:
        samples: Number of samples; unused with a sampler.
        batch: Size of a batch; None: each item is one key, or what ``sampler`` gives.
        shuffled: Whether the order is random.
        sampler: Gives keys, or lists of keys, with a length.
    """

    def __init__(
        self,
        samples: int,
        *,
        batch: int | None,
        shuffled: bool,
        sampler: Iterable[Any] | None,
        generator: torch.Generator | None,
        drop_last: bool,
    ) -> None:
        super().__init__()
        self._samples = samples
        self._batch = batch
        self._shuffled = shuffled
        self._sampler = sampler
        self._generator = generator
        self._drop_last = drop_last
        self._seed = 0
        self._saved: Any = None  # from what the order is made again
        self._drawn: str | None = None  # the generator's state behind the epoch's draws
        self._order: Sequence[Any] | torch.Tensor = ()
        self._next = 0

    def __len__(self) -> int:
        """Batches of an epoch."""
        samples = self._samples if self._sampler is None else len(self._sampler)  # type: ignore[arg-type]
        return _batches(samples, self._batch, drop_last=self._drop_last)

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        super().reset(dict(initial_state) if initial_state is not None else None)
        if initial_state is None:
            self._seed = draw_seed(self._generator)
            self._next = 0
            self._draw()
            self._drawn = _kept(self._generator)
        else:
            expect_same(initial_state, self._shape())
            self._seed, self._next = int(initial_state["seed"]), int(initial_state["next"])
            self._saved, self._drawn = initial_state["order"], initial_state["generator"]
            _put(self._generator, self._drawn)
            self._order = self._made(self._saved)

    def _draw(self) -> None:
        if self._sampler is not None:
            self._saved = _packed([_plain(key) for key in self._sampler])
        elif not self._shuffled:
            self._saved = None
        elif self._generator is None:
            self._saved = draw_seed(None)
        else:
            self._saved = _kept(self._generator)
            self._order = _permutation(self._samples, self._generator)
            return
        self._order = self._made(self._saved)

    def _made(self, saved: Any) -> Any:
        if saved is None:
            return range(self._samples)
        if not isinstance(saved, int | str):
            return _unpacked(saved)
        generator = torch.Generator()
        if isinstance(saved, int):
            generator.manual_seed(saved)
        else:
            _put(generator, saved)
        return _permutation(self._samples, generator)

    def next(self) -> Batch:
        begin = self._next * (self._batch or 1)
        end = min(begin + (self._batch or 1), len(self._order))
        if begin >= end or (self._batch is not None and self._drop_last and end - begin < self._batch):
            raise StopIteration
        self._next += 1
        keys = self._order[begin:end]
        keys = keys.tolist() if isinstance(keys, torch.Tensor) else list(keys)
        return self._seed, keys if self._batch is not None else keys[0]

    def get_state(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "next": self._next,
            "order": self._saved,
            "generator": self._drawn,
            "shape": self._shape(),
        }

    def _shape(self) -> dict[str, Any]:
        order = "sampler" if self._sampler is not None else "random" if self._shuffled else "sequential"
        return {
            "samples": self._samples,
            "batch_size": self._batch,
            "drop_last": self._drop_last,
            "order": order,
        }


def _batches(samples: int, size: int | None, *, drop_last: bool) -> int:
    if size is None:
        return samples
    return samples // size if drop_last else -(-samples // size)


def _plain(key: Any) -> Any:
    """A key as JSON has it: of a batch sampler, which may use one list again, a list of them."""
    if isinstance(key, list | range):
        return [_plain(each) for each in key]
    if isinstance(key, tuple):
        return tuple(map(_plain, key))
    if isinstance(key, numpy.ndarray):
        return key.tolist()
    return key.item() if isinstance(key, numpy.generic) else key


def _packed(order: list[Any]) -> Any:
    """Keys, or lists of keys, as text if all are whole numbers: a text of many is copied and saved in no time."""
    batches = [key for key in order if type(key) is list]
    keys = [key for batch in batches for key in batch] if batches else order
    if len(batches) not in (0, len(order)) or not all(type(key) is int and abs(key) < 2**63 for key in keys):
        return order
    return {"keys": _text(keys), "sizes": _text([len(batch) for batch in batches]) if batches else None}


def _unpacked(saved: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    keys, sizes = _numbers(saved["keys"]), saved["sizes"]
    return keys if sizes is None else [batch.tolist() for batch in torch.split(keys, _numbers(sizes).tolist())]


def _text(numbers: list[int]) -> str:
    return numpy.array(numbers, dtype=numpy.int64).tobytes().hex()


def _numbers(text: str) -> torch.Tensor:
    return torch.from_numpy(numpy.frombuffer(bytearray.fromhex(text), dtype=numpy.int64))


def _permutation(samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.tensor(list(RandomSampler(range(samples), generator=generator)), dtype=torch.int64)


class Samples(BaseNode[tuple[int, int, Any]]):
    """The samples of an iterable, with the epoch's seed and the number of the first one: lists of them, or one.

    The iterable's ``state_dict`` and ``load_state_dict`` are used where it has them. Others are iterated anew, and what
    was given is passed over.
    """

    def __init__(
        self, samples: Iterable[Any], *, batch: int | None, generator: torch.Generator | None, drop_last: bool
    ) -> None:
        super().__init__()
        self.source: BaseNode[Any] = IterableWrapper(samples)
        self._iterable = samples
        self._batch = batch
        self._generator = generator
        self._drop_last = drop_last
        self._seed = 0
        self._drawn: str | None = None  # the generator's state behind the epoch's draws
        self._next = 0

    def __len__(self) -> int:
        """Batches of an epoch, if the iterable has a length."""
        samples = len(self._iterable)  # type: ignore[arg-type]
        return _batches(samples, self._batch, drop_last=self._drop_last)

    def reset(self, initial_state: Mapping[str, Any] | None = None) -> None:
        super().reset(dict(initial_state) if initial_state is not None else None)
        if initial_state is None:
            self._seed, self._next = draw_seed(self._generator), 0
            self._drawn = _kept(self._generator)
            self.source.reset(None)
        else:
            expect_same(initial_state, self._shape())
            self._seed, self._next = int(initial_state["seed"]), int(initial_state["next"])
            self._drawn = initial_state["generator"]
            _put(self._generator, self._drawn)
            self.source.reset(dict(initial_state["source"]))

    def next(self) -> tuple[int, int, Any]:
        begin = self._next
        if self._batch is None:
            item = next(self.source)
            self._next += 1
            return self._seed, begin, item
        items: list[Any] = []
        while len(items) < self._batch:
            try:
                items.append(next(self.source))
            except StopIteration:
                break
        self._next += len(items)
        if not items or (self._drop_last and len(items) < self._batch):
            raise StopIteration
        return self._seed, begin, items

    def get_state(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "next": self._next,
            "generator": self._drawn,
            "source": self.source.state_dict(),
            "shape": self._shape(),
        }

    def _shape(self) -> dict[str, Any]:
        return {"batch_size": self._batch, "drop_last": self._drop_last}


# ---- functions of workers -------------------------------------------------------------------------------------------


class Fetch:
    """Makes a batch of a dataset's samples. Random numbers of a sample follow from the epoch's seed and its key.

    Args:
        batched: Whether items are lists of keys.
        seeded: Whether the generators of torch, Python and numpy begin with each sample's seed.
    """

    def __init__(
        self,
        dataset: Any,
        function: Callable[[Any], Any] | None,
        collate: Callable[[Any], Any],
        *,
        batched: bool,
        seeded: bool,
    ) -> None:
        self._dataset = dataset
        self._function = function
        self._collate = collate
        self._batched = batched
        self._seeded = seeded

    def __call__(self, item: Batch) -> Any:
        seed, keys = item
        samples = self._samples(seed, keys) if self._batched else self._sample(seed, keys)
        with places.at(_place(seed, keys, "collate "), seeded=self._seeded):
            return self._collate(samples)

    def _samples(self, seed: int, keys: Sequence[Any]) -> Any:
        if not _makes_batches(self._dataset):
            return [self._sample(seed, key) for key in keys]
        with places.at(_place(seed, keys), seeded=self._seeded):
            samples = self._dataset.__getitems__(keys)
        if self._function is None:
            return samples
        return [self._mapped(seed, key, each) for key, each in zip(keys, samples, strict=True)]

    def _sample(self, seed: int, key: Any) -> Any:
        with places.at(_place(seed, key), seeded=self._seeded):
            sample = self._dataset[key]
            return sample if self._function is None else self._function(sample)

    def _mapped(self, seed: int, key: Any, sample: Any) -> Any:
        if self._function is None:
            return sample
        with places.at(_place(seed, key), seeded=self._seeded):
            return self._function(sample)


class Collate:
    """Makes a batch of an iterable's samples."""

    def __init__(
        self, function: Callable[[Any], Any] | None, collate: Callable[[Any], Any], *, batched: bool, seeded: bool
    ) -> None:
        self._function = function
        self._collate = collate
        self._batched = batched
        self._seeded = seeded

    def __call__(self, item: tuple[int, int, Any]) -> Any:
        seed, first, samples = item
        if self._function is not None and self._batched:
            samples = [self._mapped(seed, first + i, sample) for i, sample in enumerate(samples)]
        elif self._function is not None:
            samples = self._mapped(seed, first, samples)
        with places.at(_place(seed, first, "collate "), seeded=self._seeded):
            return self._collate(samples)

    def _mapped(self, seed: int, number: int, sample: Any) -> Any:
        if self._function is None:
            return sample
        with places.at(_place(seed, number), seeded=self._seeded):
            return self._function(sample)


def _makes_batches(dataset: Any) -> bool:
    """Whether a dataset makes samples of several keys at once. A subset makes them as its dataset does."""
    if type(dataset) is Subset:
        return _makes_batches(dataset.dataset)
    return bool(getattr(dataset, "__getitems__", None))


def _place(seed: int, key: Any, kind: str = "") -> Place:
    """The place of a sample, or of what is done with samples.

    Raises:
        InvalidArgument: The key's text tells where it lies, and not which one it is.
    """
    if not kind and type(key) is int:
        return Place(seed, 0, key)
    text = repr(key)
    if " at 0x" in text:
        raise InvalidArgument(
            f"a sampler gives {text}: random numbers follow from a key's repr, so give it one of its own"
        )
    return Place(seed, 0, kind + text)
