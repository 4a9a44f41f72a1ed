"""Six trainings on Python's own help text, on two simulated devices: two widths, three learning rates.

    python examples/fleet_sweep.py [FOLDER]

The wide model has no room on a device as plain PyTorch trains it. The fleet finds out, and trains it by other means. A
second run with the same folder, after Ctrl-C or a crash, goes on where the first one was.
"""

import pydoc_data.topics as topics
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import hydra_ext

LENGTH = 48  # bytes of a line of text
BUDGET = "12MiB"  # of a device


class Block(nn.Module):
    """Causal attention and a layer of its own for each place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.read, self.write = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.read(self.norm(x)).chunk(3, dim=-1))
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.write(seen.transpose(1, 2).flatten(2))
        return x + self.think(x)


class Text(nn.Module):
    """Guesses each byte of a text from those before it."""

    def __init__(self, width: int, blocks: int = 4) -> None:
        super().__init__()
        self.byte, self.place = nn.Embedding(256, width), nn.Parameter(torch.randn(LENGTH, width) / 10)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.byte(ids) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count: int, rows: int = 8, microbatches: int = 2) -> list[list[Tensor]]:
    """Pieces of the text, drawn by torch's generator: its seed is the job's."""
    text = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
    starts = torch.randint(0, len(text) - LENGTH - 1, (count, microbatches, rows))
    return [[torch.stack([text[i : i + LENGTH + 1] for i in row]) for row in batch.tolist()] for batch in starts]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def held_out() -> list[Tensor]:
    return batches(1, rows=32)[0]


def jobs(steps: int = 25) -> list[hydra_ext.Job]:
    return [
        hydra_ext.Job(
            f"width={width}-lr={rate}",
            model=partial(Text, width),
            optimizer=partial(hydra_ext.optim.AdamW, lr=rate),
            data=partial(batches, steps),
            loss=loss_of,
            steps=steps,
            schedule=partial(cosine, steps=steps),
            evaluate=held_out,
            max_norm=1.0,
        )
        for width in (32, 96)
        for rate in (1e-2, 3e-3, 1e-3)
    ]


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "fleet_sweep")
    fleet = hydra_ext.Fleet(folder, devices=2, budget=BUDGET)
    results = fleet.resume() if (folder / "journal.jsonl").exists() else fleet.run(jobs())
    print(results)
    fleet.write_report(folder / "report.html")
    print(f"the report is in {folder / 'report.html'}")


if __name__ == "__main__":
    main()
