"""Trains a network on photographs that workers decode, crop and flip, under a budget smaller than its weights.

The number of workers follows from the pace of the training; `data.from_dataset` stands in the place of DataLoader. The
network learns which of scikit-learn's two photographs a crop is from. Needs ``pip install 'hydra-ext[data,demo]'``.
"""

import io
from importlib.resources import files

import numpy
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset

import hydra_ext
from hydra_ext import data

SIDE = 64


class Photographs(Dataset[tuple[bytes, int]]):
    """Encoded photographs and their labels."""

    def __init__(self, samples: int) -> None:
        folder = files("sklearn.datasets.images")
        self._encoded = [(folder / name).read_bytes() for name in ("china.jpg", "flower.jpg")]
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        return self._encoded[index % 2], index % 2


def augmented(sample: tuple[bytes, int]) -> tuple[torch.Tensor, int]:
    """A random crop (3, SIDE, SIDE), in a worker. Its random numbers follow from the sample's key."""
    encoded, label = sample
    left, top = int(torch.randint(0, 640 - 2 * SIDE, ())), int(torch.randint(0, 427 - 2 * SIDE, ()))
    picture = Image.open(io.BytesIO(encoded)).convert("RGB").crop((left, top, left + 2 * SIDE, top + 2 * SIDE))
    pixels = torch.from_numpy(numpy.array(picture.resize((SIDE, SIDE)))).permute(2, 0, 1).float() / 255
    return (pixels.flip(2) if torch.rand(()) < 0.5 else pixels), label


def layer(before: int, after: int, *, stride: int = 1) -> nn.Module:
    convolution = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU())


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        layer(3, 32, stride=2),
        layer(32, 128, stride=2),
        layer(128, 256, stride=2),
        *(layer(256, 256) for _ in range(9)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(256, 2),
    )  # 22 MiB of weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    loader = data.from_dataset(Photographs(640), 16, shuffle=True, map=augmented, memory="1GiB")
    with loader, hydra_ext.offload(model, optimizer, budget="16MiB") as run:
        right = total = 0
        for step, (pictures, labels) in enumerate(loader, start=1):
            logits = model(pictures)
            nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            right += int((logits.argmax(1) == labels).sum())
            total += len(labels)
            if step % 10 == 0:
                print(f"step {step}: {right / total:.0%} of the crops are recognised", flush=True)
                right = total = 0
        print(loader.report())
        print(run.report())


if __name__ == "__main__":
    main()
