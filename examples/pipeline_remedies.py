"""What helps where gradients are one step late: a small GPT-2 learns Python's own help text in stages, once without
delay and then with "2bw" and five optimizers, each after the same warm-up:

    torchrun --nproc-per-node 2 examples/pipeline_remedies.py
"""

import pydoc_data.topics as topics

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel

import hydra_ext
from hydra_ext.optim import AdamW, DelayCorrectedAdamW, Muon, NAdamW

STEPS, WARM_UP, RATE = 120, 24, 3e-3

text = torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8).long()
batches = text[: STEPS * 16 * 64].view(STEPS, 16, 64)
config = GPT2Config(n_layer=4, n_embd=64, vocab_size=256, n_positions=64, n_head=4, bos_token_id=0, eos_token_id=0)


def muon(params: list[torch.nn.Parameter], model: GPT2LMHeadModel, correction: float) -> Muon:
    embeddings = (model.transformer.wte.weight, model.transformer.wpe.weight)
    rest = [p for p in params if p.dim() != 2 or any(p is embedding for embedding in embeddings)]
    matrices = [p for p in params if not any(p is other for other in rest)]
    groups = [{"params": matrices}, {"params": rest, "orthogonalize": False}]
    return Muon(groups, lr=RATE, weight_decay=0.01, correction=correction)


OPTIMIZERS = {
    "AdamW, no delay": lambda params, model: AdamW(params, lr=RATE),
    "AdamW": lambda params, model: AdamW(params, lr=RATE),
    "DelayCorrectedAdamW": lambda params, model: DelayCorrectedAdamW(params, lr=RATE),
    "NAdamW": lambda params, model: NAdamW(params, lr=RATE),
    "Muon": lambda params, model: muon(params, model, correction=0.0),
    "Muon, corrected": lambda params, model: muon(params, model, correction=1.0),
}


def train(make, schedule: str) -> float:
    """The mean of the last 20 losses."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    with hydra_ext.Pipeline(model, lambda p: make(p, model), schedule=schedule, microbatches=4, seed=0) as pipe:
        pipe.prepare(batches[0][:4], loss_of)  # the optimizers are made
        warm_ups = [LambdaLR(each, lambda step: min(1.0, (step + 1) / WARM_UP)) for each in pipe.optimizers]
        outs = []
        for batch in batches:
            outs.append(pipe.step(batch, loss_of, max_norm=1.0))
            for each in warm_ups:
                each.step()
        return torch.stack([out.loss for out in outs[-20:]]).mean().item()


dist.init_process_group()
for name, make in OPTIMIZERS.items():
    schedule = "1f1b" if "no delay" in name else "2bw"
    loss = train(make, schedule)
    if dist.get_rank() == 0:
        print(f"{name:<20} {schedule:<5} mean of the last 20 losses {loss:.4f}")
dist.destroy_process_group()
