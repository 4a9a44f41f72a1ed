"""From how many devices on lines of two devices train faster than data parallelism alone: three models of Pal et al.

The model is that of "Optimizing Multi-GPU Parallelization Strategies for Deep Learning Training" (IEEE Micro 39(5),
2019). Of its results only the abstract's could be read here: at scale the hybrid is at least 26.5 % (Inception-V3),
8 % (GNMT) and 22 % (BigLSTM) faster. Its inputs are in pictures. Each input below says where it is from:

- *public*: PipeDream's profiles (msr-fiddle/pipedream at 7db6a1c, one V100) give seconds and bytes of Inception-V3 and
  GNMT. By the bytes of their activations a step has 128 images, and 1536 tokens, taken as 64 sentences of 24. ImageNet
  has 1,281,167 images. WMT'16 English-German has about 4.5 million pairs. The One Billion Word benchmark has about 0.8
  billion words, and BigLSTM 1.04 billion parameters (Jozefowicz et al., 2016).
- *assumed*: the speedup of two devices in a line, which is the abstract's gain; all epochs; BigLSTM's seconds,
  and 20 words in a sample; the link of 12.5 GB/s. The curves of epochs grow by a quarter up to four times a harmless
  batch, and double with each doubling from there. Beyond 64 times they end.

So the curves show the form that the paper describes, and not its figures.

    python benchmarks/crossover.py [--data FOLDER]

``--data`` is a folder with ``pipedream/profiles``. Without it their seconds and bytes are those noted here.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

from hydra_ext.plan import crossover

LINK = 12.5e9


@dataclass(frozen=True)
class Subject:
    """One model.

    Attributes:
        profile: Name of PipeDream's profile, which has the seconds and bytes.
        harmless: Samples of a step up to which a training takes ``epochs``.
    """

    name: str
    profile: str | None
    epoch_samples: int
    line_batch: int
    line_seconds: float
    gradient_bytes: float
    speedup: float
    epochs: float
    harmless: int

    def curve(self) -> list[tuple[int, float]]:
        harmless, factors = self.harmless, {1: 1.0, 4: 1.25, 8: 2.0, 16: 4.0, 32: 8.0, 64: 16.0}
        return [(factor * harmless, self.epochs * more) for factor, more in factors.items()]


WORDS = 20  # in a sample of BigLSTM
SUBJECTS = [
    Subject("Inception-V3", "inception_v3", 1_281_167, 128, 0.0, 0.0, 1.265, 90.0, 2048),
    Subject("GNMT", "gnmt", 4_500_000, 64, 0.0, 0.0, 1.08, 6.0, 1024),
    Subject("BigLSTM", None, 800_000_000 // WORDS, 128, 0.5, 4 * 1.04e9, 1.22, 5.0, 2048),
]

KNOWN = {"inception_v3": (0.689038, 108_645_056), "gnmt": (0.089416, 775_063_808)}
"""Seconds of a step on one V100 without reading inputs, and bytes of the weights, as the profiles have them."""


def measured(folder: Path, profile: str) -> tuple[float, float]:
    nodes = json.loads((folder / "pipedream/profiles" / f"{profile}.json").read_text())["nodes"]
    nodes = [node for node in nodes if not node["desc"].startswith("Input")]
    milliseconds = sum(node["forward_ms"] + node["backward_ms"] for node in nodes)
    return milliseconds / 1000, sum(node["parameter_bytes"] for node in nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    folder = parser.parse_args().data
    for subject in SUBJECTS:
        if subject.profile is not None:
            seconds, nbytes = measured(folder, subject.profile) if folder else KNOWN[subject.profile]
            subject = replace(subject, line_seconds=seconds, gradient_bytes=nbytes)
        found = crossover(
            subject.curve(),
            epoch_samples=subject.epoch_samples,
            line_batch=subject.line_batch,
            line_seconds=subject.line_seconds,
            speedups={2: subject.speedup},
            gradient_bytes=subject.gradient_bytes,
            link=LINK,
        )
        print(f"## {subject.name}")
        print(f"{subject.line_seconds:.4g} s a step of {subject.line_batch}, {subject.gradient_bytes / 2**20:.4g} MiB")
        print(f"```text\n{found}\n```\n")


if __name__ == "__main__":
    main()
