"""Loaders of datasets, in the place of DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.data import IterableDataset, default_collate, default_convert
from torchdata.nodes import BaseNode

from hydra_ext.data.loader import Loader
from hydra_ext.data.stages.ahead import expect_positive
from hydra_ext.data.stages.map import Map, Method, OnError
from hydra_ext.data.stages.samples import Collate, Fetch, Keys, Samples
from hydra_ext.data.stages.to_device import ToDevice
from hydra_ext.errors import InvalidArgument


def from_dataset(
    dataset: Any,
    batch_size: int | None = 1,
    shuffle: bool = False,
    sampler: Iterable[Any] | None = None,
    batch_sampler: Iterable[Any] | None = None,
    num_workers: int | Literal["auto"] = "auto",
    collate_fn: Callable[[Any], Any] | None = None,
    *,
    drop_last: bool = False,
    generator: torch.Generator | None = None,
    prefetch_factor: int = 2,
    map: Callable[[Any], Any] | None = None,
    method: Method = "process",
    on_error: OnError = "raise",
    memory: int | str = "1GiB",
    device: torch.device | str | None = None,
) -> Loader:
    """A loader of a dataset's batches, in the place of ``torch.utils.data.DataLoader``.

    The order of samples is DataLoader's, drawn from the same generators. Random numbers of a sample follow from the
    epoch's seed and the sample's key alone.

    Args:
        dataset: With ``__getitem__``, or an ``IterableDataset``. The latter is iterated in a thread of this process.
        batch_size: None for single samples.
        shuffle: Whether each epoch has another order.
        sampler: Gives keys. It is listed when an epoch begins.
        batch_sampler: Gives lists of keys.
        num_workers: Number of workers to begin with, which ``loader.stages["fetch"].workers`` changes. With
            ``"auto"`` the loader is tuned, as :func:`tuned` says.
        collate_fn: Makes a batch of a list of samples, in a worker.
        drop_last: Whether a last batch with fewer samples is left out.
        generator: Of the order.
        prefetch_factor: Batches on the way for each worker.
        map: Called with each sample, in a worker.
        method: ``"process"``, or ``"thread"`` for work that leaves the interpreter lock to others.
        on_error: ``"raise"``, or ``"skip"``: batches that cannot be made are left out and counted.
        memory: Most bytes of the results of processes, and of the processes themselves in a tuned loader.
        device: To which batches are copied before they are asked for, as :class:`ToDevice` does. None copies nothing.

    Raises:
        InvalidArgument: Arguments exclude one another, or one is out of range.
    """
    expect_positive("batch_size", 1 if batch_size is None else batch_size)
    workers = 1 if num_workers == "auto" else num_workers
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise InvalidArgument(f"num_workers={num_workers!r}: give 'auto', or a whole number from 1 on")
    expect_positive("prefetch_factor", prefetch_factor)
    _check(batch_size, shuffle, sampler, batch_sampler, drop_last, is_stream=isinstance(dataset, IterableDataset))
    batched = batch_size is not None or batch_sampler is not None
    collate = (default_collate if batched else default_convert) if collate_fn is None else collate_fn
    kind = Collate if isinstance(dataset, IterableDataset) else partial(Fetch, dataset)
    function = kind(map, collate, batched=batched, seeded=method == "process")
    size, keys = (batch_size, sampler) if batch_sampler is None else (None, batch_sampler)
    source = _source(dataset, size, keys, shuffle, generator, drop_last)
    stage = partial(Map, name="fetch", method=method, on_error=on_error)
    fetch = stage(source, function, workers=workers, per_worker=prefetch_factor)
    root = fetch if device is None else ToDevice(fetch, device)
    return Loader(root, memory=memory, length=source.__len__, is_tuned=num_workers == "auto")


def tuned(nodes: BaseNode[Any], *, memory: int | str) -> Loader:
    """A loader whose stages get workers while training runs: as many as make the training faster.

    Each stage begins with one worker. Where the training waits for data, the stages that can do least get more, and
    what does not make the training's steps come faster is taken back. So is what nothing waits for. The training's
    own need of the processor counts, since its pace is what is measured.

    Args:
        nodes: The pipeline's last node. The workers of each :class:`Map` in it are tuned.
        memory: Most bytes of all worker processes together, and of their results. Pages of files do not count.
            Workers are added only where memory for them is left, and are taken back if more is measured.

    Raises:
        InvalidArgument: Two stages have the same name, or none has workers.
        StateError: This system does not tell what processes take.
    """
    loader = Loader(nodes, memory=memory, is_tuned=True)
    if not loader.stages:
        raise InvalidArgument("this pipeline has no workers to tune: give it a hydra_ext.data.Map")
    return loader


def _source(
    dataset: Any,
    batch: int | None,
    sampler: Iterable[Any] | None,
    shuffle: bool,
    generator: torch.Generator | None,
    drop_last: bool,
) -> Keys | Samples:
    if isinstance(dataset, IterableDataset):
        return Samples(dataset, batch=batch, generator=generator, drop_last=drop_last)
    return Keys(
        len(dataset) if sampler is None else 0,
        batch=batch,
        shuffled=shuffle,
        sampler=sampler,
        generator=generator,
        drop_last=drop_last,
    )


def _check(
    batch_size: int | None,
    shuffle: bool,
    sampler: Iterable[Any] | None,
    batch_sampler: Iterable[Any] | None,
    drop_last: bool,
    *,
    is_stream: bool,
) -> None:
    """As DataLoader's arguments exclude one another."""
    if is_stream and (shuffle or sampler is not None or batch_sampler is not None):
        raise InvalidArgument("an IterableDataset gives its own order: leave shuffle=, sampler=, batch_sampler= out")
    if batch_sampler is not None and (batch_size != 1 or shuffle or sampler is not None or drop_last):
        raise InvalidArgument(
            "batch_sampler= stands for batch_size=, shuffle=, sampler= and drop_last=: leave them out"
        )
    if sampler is not None and shuffle:
        raise InvalidArgument("sampler= gives the order: leave shuffle= out")
    if batch_size is None and drop_last:
        raise InvalidArgument("drop_last= is for batches: give batch_size=, too")
    given = sampler if batch_sampler is None else batch_sampler
    if given is not None and not hasattr(given, "__len__"):
        raise InvalidArgument(
            f"{type(given).__name__} has no length: give a sampler with __len__, or an IterableDataset for samples "
            "without end"
        )
