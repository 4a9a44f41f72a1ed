"""Small trainings on real data that needs no download, from first weights and batches of a seed.

CNN: six convolutions with ReLUs, three max-pools and two linear layers learn scikit-learn's digits (1,797 real images,
here of 16 x 16 pixels; one half to learn from, the other half to test with) by SGD with momentum. GPT-2: one over bytes
learns the help texts that ship with Python, by AdamW.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from delay_convergence import BETAS, DECAY, LAYERS, LENGTH, ROWS, WIDTH
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F

from hydra_ext.integrations import byte_text

BATCH, PIXELS, CHANNELS = 64, 16, 16
CNN_RATE, GPT_RATE, MOMENTUM = 0.01, 3e-3, 0.9
PIECES = 20  # of text, each of ROWS rows, that losses are told of

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Training:
    """A model, what it learns from, and how well it has learnt.

    Attributes:
        model: with the first weights of a seed.
        batches: so many, of a seed.
        score: of a model, ``score_name`` is what it is, ``score_form`` how it is written.
    """

    name: str
    steps: int
    model: Callable[[int], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batches: Callable[[int, int], Sequence[Batch]]
    loss: Callable[[nn.Module, Batch], Tensor]
    score: Callable[[nn.Module], float]
    score_name: str
    score_form: str


@dataclass(frozen=True)
class Digits:
    images: Tensor
    classes: Tensor


@functools.cache
def digits() -> tuple[Digits, Digits]:
    """To learn from, and to test with."""
    loaded = load_digits()
    images = torch.from_numpy(loaded.images).float()[:, None]
    images = F.interpolate(images, size=(PIXELS, PIXELS), mode="bilinear", align_corners=False)
    classes = torch.from_numpy(loaded.target)
    halves = train_test_split(range(len(classes)), test_size=0.5, random_state=0, stratify=loaded.target)
    first, second = (torch.tensor(half) for half in halves)
    images = (images - images[first].mean()) / images[first].std()
    return Digits(images[first], classes[first]), Digits(images[second], classes[second])


def make_cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    inside = 1
    for outside in (CHANNELS, 2 * CHANNELS, 4 * CHANNELS):
        for _ in range(2):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    features = inside * (PIXELS // 8) ** 2
    layers += [nn.Flatten(), nn.Linear(features, 128), nn.ReLU(), nn.Linear(128, 10)]
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def digit_batches(steps: int, seed: int) -> list[Batch]:
    """Each image once before any comes again, but for those that are left over."""
    learnt, _ = digits()
    generator = torch.Generator().manual_seed(seed)

    def chosen() -> Iterator[Tensor]:
        while True:
            order = torch.randperm(len(learnt.classes), generator=generator)
            yield from order[: len(order) // BATCH * BATCH].split(BATCH)

    return [(learnt.images[rows], learnt.classes[rows]) for rows in itertools.islice(chosen(), steps)]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    _, unseen = digits()
    return (model(unseen.images).argmax(1) == unseen.classes).double().mean().item()


@functools.cache
def pieces() -> list[Tensor]:
    return byte_text.batches(count=PIECES, rows=ROWS, length=LENGTH, seed=2**31)


@torch.no_grad()
def text_loss(model: nn.Module) -> float:
    return statistics.fmean(byte_text.loss_of(model, piece).item() for piece in pieces())


def make_gpt2(seed: int) -> nn.Module:
    return byte_text.model(layers=LAYERS, width=WIDTH, length=LENGTH, seed=seed).eval()  # no dropout


def text_batches(steps: int, seed: int) -> list[Batch]:
    return [(ids,) for ids in byte_text.batches(count=steps, rows=ROWS, length=LENGTH, seed=seed)]


def cnn(steps: int) -> Training:
    return Training(
        name="CNN",
        steps=steps,
        model=make_cnn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=CNN_RATE, momentum=MOMENTUM),
        batches=digit_batches,
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        score=accuracy,
        score_name="test accuracy",
        score_form=".2%",
    )


def gpt2(steps: int) -> Training:
    return Training(
        name="GPT-2",
        steps=steps,
        model=make_gpt2,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=GPT_RATE, betas=BETAS, weight_decay=DECAY),
        batches=text_batches,
        loss=lambda model, batch: byte_text.loss_of(model, batch[0]),
        score=text_loss,
        score_name="loss",
        score_form=".4f",
    )
