"""A training step on a GPU: plain PyTorch, and offloaded with room for all, half and a quarter of the weights.

    make gpu-bench

Prints, per budget, the step's time against the plain step of the same round, the peak that torch's allocator reserved,
and the link's rate as a share of what a single large copy reaches. Needs a GPU; fails without one.
"""

from __future__ import annotations

import copy
import sys

import torch
from measure import compare, timed
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext

LAYERS, WIDTH, TOKENS, ROWS = 24, 2048, 1024, 4


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=16, n_positions=TOKENS, vocab_size=8192, use_cache=False)
    )


class Training:
    def __init__(self, model: GPT2LMHeadModel, ids: torch.Tensor) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.ids = ids

    def step(self) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()


def link_rate() -> float:
    """Bytes per second of one large copy from pinned memory."""
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")

    def copy_in() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    copy_in()
    return host.nbytes / min(timed(copy_in) for _ in range(3))


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a GPU, and torch finds none")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    rate = link_rate()
    model = make_model()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    ids = torch.randint(0, 8192, (ROWS, TOKENS))
    print(f"{weights / 2**30:.2f} GiB of weights, {ROWS} x {TOKENS} tokens, link {rate / 1e9:.1f} GB/s")
    plain = Training(copy.deepcopy(model).cuda(), ids.cuda())
    plain.step()
    torch.cuda.reset_peak_memory_stats()
    plain.step()
    activations = torch.cuda.max_memory_reserved() - 2 * weights
    for share in (1.25, 0.5, 0.25):
        subject = Training(copy.deepcopy(model), ids)
        budget = activations + int(share * weights) + weights // 8
        with hydra_ext.offload(subject.model, subject.optimizer, budget=budget, device="cuda") as run:
            result = compare(plain.step, subject.step, rounds=9)
            print(
                f"room for {share:.0%}: plain {result.reference_seconds:.3f} s, offloaded {result.subject_seconds:.3f} "
                f"s, ratio {result.ratio:.3f}, spread {result.spread:.3f}\n{run.report()}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
