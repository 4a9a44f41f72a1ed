"""Trains a GPT-2 on Python's own help text under a device budget smaller than its weights.

By itself, or with `torchrun --nproc-per-node 2` in several processes, each on a part of the text.
"""

import pydoc_data.topics as topics

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext

text = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
data = [text[start : start + 128].view(2, 64) for start in range(0, 20 * 128, 128)]
if dist.is_torchelastic_launched():
    dist.init_process_group()
    data = data[dist.get_rank() :: dist.get_world_size()]

torch.manual_seed(0)
config = GPT2Config(n_layer=8, n_embd=512, vocab_size=256, n_positions=64, n_head=8, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

with hydra_ext.offload(model, optimizer, budget="80MiB") as run:
    for step, ids in enumerate(data):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")
    print(run.report())
