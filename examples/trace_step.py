"""Trains a GPT-2 by whole steps under a device budget smaller than its weights, and writes a trace of the last two."""

import pydoc_data.topics as topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext

text = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
data = [text[start : start + 512].view(4, 2, 64) for start in range(0, 6 * 512, 512)]

torch.manual_seed(0)
config = GPT2Config(n_layer=8, n_embd=512, vocab_size=256, n_positions=64, n_head=8, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
optimizer = hydra_ext.optim.AdamW(model.parameters(), lr=3e-4)
device = hydra_ext.SimulatedDevice(to_device_bytes_per_second=400e6, to_host_bytes_per_second=400e6)

with hydra_ext.offload(model, optimizer, budget="160MiB", device=device) as run:
    run.on_step(print, tokens=torch.numel)
    for microbatches in data[:4]:
        run.step(microbatches, lambda ids: model(input_ids=ids, labels=ids).loss, max_norm=1.0)
    with run.trace("step.json"):
        for microbatches in data[4:]:
            run.step(microbatches, lambda ids: model(input_ids=ids, labels=ids).loss, max_norm=1.0)
