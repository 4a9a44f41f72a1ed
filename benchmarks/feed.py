"""An epoch of batches beside torch's DataLoader with as many workers: cd benchmarks && python feed.py [--rounds 9]

The consumer waits for a known time behind each batch, as for a GPU: it takes no core. The pipelines:

    photographs   decodes a JPEG of scikit-learn, crops it, resizes the crop to 224 x 224, flips half of them
    texts         counts the words of windows of scikit-learn's descriptions, which are pure Python
    rows          copies rows of 600 KB, as from a table in memory

"DataLoader" has persistent workers; "default" is DataLoader without any. All run by turns, DataLoader twice. Goal: ours
is at least 0.98 times as fast as DataLoader with as many workers. The first batch of each is in its warm-up.
"""

from __future__ import annotations

import argparse
import collections
import io
import platform
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import numpy
import torch
from measure import by_turns, verdict
from torch.utils.data import DataLoader, Dataset

from hydra_ext import data

GOAL = 0.98


class Photographs(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        folder = files("sklearn.datasets.images")
        self._encoded = [(folder / name).read_bytes() for name in ("china.jpg", "flower.jpg")]

    def __len__(self) -> int:
        return 384

    def __getitem__(self, index: int) -> torch.Tensor:
        from PIL import Image

        left, top = (int(each) for each in torch.randint(0, 200, (2,)))
        picture = Image.open(io.BytesIO(self._encoded[index % 2])).convert("RGB")
        picture = picture.crop((left, top, left + 220, top + 220)).resize((224, 224))
        if torch.rand(()) < 0.5:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).float().div_(255)


class Texts(Dataset[torch.Tensor]):
    def __init__(self) -> None:
        folder = files("sklearn.datasets.descr")
        self._text = " ".join(each.read_text() for each in folder.iterdir() if each.name.endswith(".rst")).split()

    def __len__(self) -> int:
        return 2560

    def __getitem__(self, index: int) -> torch.Tensor:
        words = self._text[11 * index % 2000 :][:3000]
        counts = collections.Counter(words)
        return torch.tensor([counts[word] for word in words[:512]])


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 2560

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((150_000,), float(index))


PIPELINES: dict[str, tuple[Callable[[], Dataset[torch.Tensor]], int, float]] = {  # batch size, seconds of a step
    "photographs": (Photographs, 8, 0.01),
    "texts": (Texts, 16, 0.005),
    "rows": (Rows, 16, 0.002),
}


def epoch(loader: Any, seconds: float) -> Callable[[], None]:
    def run() -> None:
        for _ in loader:
            time.sleep(seconds)

    return run


def compare(name: str, *, workers: int, rounds: int) -> bool:
    make, batch, seconds = PIPELINES[name]
    dataset = make()
    plain = [DataLoader(dataset, batch, num_workers=workers, persistent_workers=True) for _ in range(2)]
    with data.from_dataset(dataset, batch, num_workers=workers) as loader:
        series = by_turns(
            {
                "DataLoader": epoch(plain[0], seconds),
                "ours": epoch(loader, seconds),
                "twin": epoch(plain[1], seconds),
                "default": epoch(DataLoader(dataset, batch), seconds),
            },
            rounds=rounds,
        )
        report = loader.report()
    ratio, spread = series.speed("ours", "DataLoader"), series.spread("DataLoader", "twin")
    holds = ratio >= GOAL
    print(
        f"{name}: DataLoader {series.median('DataLoader'):.3f} s, ours {series.median('ours'):.3f} s, default "
        f"{series.median('default'):.3f} s; ours is {ratio:.3f} times as fast as DataLoader (goal {GOAL}; "
        f"identical runs differ by {spread:.1%}), {series.speed('ours', 'default'):.2f} times as fast as the default; "
        f"{report.deaths} deaths, {report.inline} results beside the memory: "
        f"{verdict(spread, margin=max(abs(ratio - GOAL), 0.02), holds=holds)}",
        flush=True,
    )
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=PIPELINES)
    asked = parser.parse_args()
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {asked.workers} workers, {asked.rounds} rounds"
    )
    held = [
        compare(name, workers=asked.workers, rounds=asked.rounds)
        for name in ([asked.only] if asked.only else PIPELINES)
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
