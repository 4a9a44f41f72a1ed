"""Trains a GPT-2 on Python's own help text, in stages on several ranks:

    torchrun --nproc-per-node 4 examples/pipeline_text.py

With 2 processes, or any other number, the losses are the same.
"""

import pydoc_data.topics as topics

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext

text = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
batches = text[: 20 * 16 * 64].view(20, 16, 64)  # of which each step cuts one into 8 microbatches of 2 rows
config = GPT2Config(n_layer=8, n_embd=256, vocab_size=256, n_positions=64, n_head=8, bos_token_id=0, eos_token_id=0)

dist.init_process_group()
torch.manual_seed(0)
model = hydra_ext.materialize(lambda: GPT2LMHeadModel(config))  # no rank ever has more than its stage's weights


def loss_of(ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=ids, use_cache=False).loss


with hydra_ext.Pipeline(
    model, lambda params: hydra_ext.optim.AdamW(params, lr=3e-4), schedule="2bw", microbatches=8
) as pipe:
    for step, batch in enumerate(batches):
        out = pipe.step(batch, loss_of, max_norm=1.0)
        if step % 5 == 4 and pipe.rank == 0:
            print(f"step {step + 1}: loss {out.loss.item():.4f}")
    if pipe.rank == 0:
        print(pipe.report())
dist.destroy_process_group()
