"""Pipelines of data whose workers can change in number while training runs, within a memory limit.

Needs torchdata: ``pip install 'hydra-ext[data]'``.
"""

from importlib.util import find_spec

from hydra_ext.data.places import generator, numpy_generator
from hydra_ext.errors import MissingDependency

if find_spec("torchdata") is None:
    raise MissingDependency("hydra_ext.data needs torchdata, which is not installed: pip install 'hydra-ext[data]'")

from hydra_ext.data.datasets import from_dataset, tuned
from hydra_ext.data.loader import Loader
from hydra_ext.data.report import LoaderReport, StageReport, TuningReport
from hydra_ext.data.stages.ahead import ItemFigures
from hydra_ext.data.stages.map import Map
from hydra_ext.data.stages.order import Batch, Prefetch, Shuffle
from hydra_ext.data.stages.to_device import ToDevice
from hydra_ext.data.tuning.views import Interval, StageView, View
from hydra_ext.data.workers.pool import WorkerFigures

__all__ = [
    "Batch",
    "Interval",
    "ItemFigures",
    "Loader",
    "LoaderReport",
    "Map",
    "Prefetch",
    "Shuffle",
    "StageReport",
    "StageView",
    "TuningReport",
    "View",
    "ToDevice",
    "WorkerFigures",
    "from_dataset",
    "generator",
    "numpy_generator",
    "tuned",
]
