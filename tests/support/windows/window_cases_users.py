"""The window's cases about a model's surroundings: other layers, hooks, files, other models."""

from __future__ import annotations

import copy
import io
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.benches import Bench, Case, Outcome
from support.windows.window_cases import case_of, gradients, train
from support.windows.window_subjects import (
    BORROWER,
    CLAMPED,
    ENCODER,
    GRU,
    LSTM,
    SHUFFLED,
    SPARSE,
    TWO_GPT2,
    batch,
    hidden,
    language_loss,
    tiny_gpt2,
    token_loss,
)

CASES: list[Case] = []
case = case_of(CASES)


# ---- other layers ---------------------------------------------------------------------------------------------------


@case(LSTM)
def an_lstm(bench: Bench) -> Outcome:
    return train(bench, token_loss)


@case(GRU)
def a_gru(bench: Bench) -> Outcome:
    return train(bench, token_loss)


@case(ENCODER)
def an_encoder_of_torchs_own_attention(bench: Bench) -> Outcome:
    losses = train(bench, token_loss)
    bench.model.eval()
    with torch.no_grad():
        fast = bench.model(batch(5))  # the fused path, which reads all weights of a layer at once
    bench.model.train()
    return [*losses, fast, *train(bench, token_loss, first=3)]


@case(BORROWER)
def a_functional_use_of_another_modules_weight(bench: Bench) -> Outcome:
    losses = train(bench, token_loss)
    for report in (run.report() for run in bench.runs):
        assert report.faults > 0 or report.evictions == 0, "no hook can foresee the use"
    return losses


@case(SHUFFLED)
def another_order_of_blocks_every_step(bench: Bench) -> Outcome:
    orders = [[3, 0, 5, 1, 4, 2], [5, 4, 3, 2, 1, 0], [0, 0, 2, 2, 1], [1, 3, 5, 0, 2, 4]]

    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        model.order = orders[index]
        return token_loss(model, index)

    losses = train(bench, loss_of, steps=4)
    for run in bench.runs:
        assert run.report().order_changes > 0
    return losses


@case(CLAMPED)
def a_forward_that_writes_to_a_parameter(bench: Bench) -> Outcome:
    before = bench.model.second.weight.detach().clone()
    bench.model(batch(0))
    once = bench.model.second.weight.detach().clone()
    assert not torch.equal(once, before)
    assert once.abs().max() <= 0.05
    return [once, *train(bench, token_loss, steps=4)]


@case(SPARSE)
def sparse_gradients_of_an_embedding(bench: Bench) -> Outcome:
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.5)
    seen: Outcome = []
    for index in range(3):
        for part in range(2):
            token_loss(bench.model, 2 * index + part).backward()
        assert bench.model.embedding.weight.grad.is_sparse
        seen.append(bench.model.embedding.weight.grad.to_dense())
        optimizer.step()
        optimizer.zero_grad()
    return seen


# ---- hooks and checkpoints of the user's ----------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """A block inside torch.utils.checkpoint, as users write it."""

    def __init__(self, block: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.__dict__["block"] = block
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return checkpoint(lambda y: self.block(y), x, use_reentrant=self.reentrant)


def loss_through_checkpoints(model: nn.Module, index: int, *, reentrant: bool) -> torch.Tensor:
    x = model.transformer.wte(batch(index)) + model.transformer.wpe(torch.arange(4))
    for block in model.transformer.h:
        x = Checkpointed(block, reentrant=reentrant)(x)
    return model.lm_head(model.transformer.ln_f(x)).pow(2).mean()


@case()
def the_users_checkpoints_of_blocks(bench: Bench) -> Outcome:
    return train(bench, lambda model, index: loss_through_checkpoints(model, index, reentrant=False))


@case()
def the_users_reentrant_checkpoints_of_blocks(bench: Bench) -> Outcome:
    return train(bench, lambda model, index: loss_through_checkpoints(model, index, reentrant=True))


@case(passes=2)
def a_hook_that_replaces_arguments(bench: Bench) -> Outcome:
    block = bench.model.transformer.h[1]
    handle = block.register_forward_pre_hook(lambda _module, args: (args[0] * 1.5, *args[1:]))

    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        return language_loss(model, index) + block(hidden(index)).pow(2).mean() * 0.01

    losses = train(bench, loss_of)
    handle.remove()
    return losses


@case(passes=2)
def hooks_around_the_backward_of_blocks(bench: Bench) -> Outcome:
    seen: list[torch.Tensor] = []
    blocks = bench.model.transformer.h

    def keep(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        seen.append(outputs[0].detach().clone())

    handles = [blocks[1].register_full_backward_hook(keep)]
    handles.append(blocks[0].register_full_backward_pre_hook(lambda _module, outputs: (outputs[0] * 2, *outputs[1:])))

    def direct(index: int) -> torch.Tensor:
        return blocks[1](hidden(index).requires_grad_()).pow(2).mean() * 0.01

    losses = train(bench, lambda model, index: language_loss(model, index) + direct(index))
    for handle in handles:
        handle.remove()
    assert len(seen) == 6
    return [*losses, *seen]


# ---- copies, files, averages ----------------------------------------------------------------------------------------


@case(passes=2)
def a_deep_copy_of_the_model(bench: Bench) -> Outcome:
    losses = train(bench, steps=2)
    copied = copy.deepcopy(bench.model)
    assert type(copied) is type(tiny_gpt2())
    assert not any("_compiled_call_impl" in module.__dict__ for module in copied.modules())
    independent = train(Bench([copied]), first=2, steps=1)
    return [*losses, *independent, *(p.detach() for p in copied.parameters()), *train(bench, first=2, steps=2)]


@case()
def a_pickle_of_the_state(bench: Bench) -> Outcome:
    losses = train(bench, steps=2)
    file = io.BytesIO()
    torch.save(bench.model.state_dict(), file)
    losses += train(bench, steps=1, first=2)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    bench.model.load_state_dict(loaded)
    return [*losses, *loaded.values(), *train(bench, steps=1, first=3)]


@case()
def a_pickle_of_the_whole_model(bench: Bench) -> Outcome:
    losses = train(bench, steps=1)
    file = io.BytesIO()
    torch.save(bench.model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is type(tiny_gpt2())
    return [*losses, *(parameter.detach() for parameter in loaded.parameters())]


@case()
def a_saved_checkpoint_of_the_library(bench: Bench) -> Outcome:
    losses = train(bench, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        bench.model.save_pretrained(folder)
        loaded = type(tiny_gpt2()).from_pretrained(folder)
    ours = dict(bench.model.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, ours[name]), name
    return [*losses, *(parameter.detach() for parameter in loaded.parameters())]


@case()
def an_average_of_parameters(bench: Bench) -> Outcome:
    average = torch.optim.swa_utils.AveragedModel(
        tiny_gpt2(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn()
    )
    for index in range(3):
        train(bench, steps=1, first=index)
        average.update_parameters(bench.model)
    return [parameter.detach() for parameter in average.parameters()]


@case()
def an_average_put_in_place_for_evaluation(bench: Bench) -> Outcome:
    model = bench.model
    shadow = [parameter.detach().clone() for parameter in model.parameters()]
    train(bench, steps=2)
    with torch.no_grad():
        for average, parameter in zip(shadow, model.parameters(), strict=True):
            average.lerp_(parameter, 0.1)
        own = [parameter.detach().clone() for parameter in model.parameters()]
        torch._foreach_copy_(list(model.parameters()), shadow)
        model.eval()
        evaluated = language_loss(model, 5)
        model.train()
        torch._foreach_copy_(list(model.parameters()), own)
    return [evaluated, *train(bench, steps=1, first=2)]


# ---- writes to hosts ------------------------------------------------------------------------------------------------


@case()
def a_write_to_a_parameter_between_forward_and_backward(bench: Bench) -> Outcome:
    said: list[str] = []
    loss = language_loss(bench.model, 0)
    with torch.no_grad():
        bench.model.transformer.h[1].mlp.c_fc.weight.add_(1.0)
    try:
        loss.backward()
    except RuntimeError as error:
        said = [type(error).__name__, str(error).partition("[")[0]]
    assert said, "the write went unnoticed"
    del loss
    bench.assert_at_rest()
    bench.model.zero_grad()
    return [*said, *train(bench)]


@case()
def a_step_between_forward_and_a_second_backward(bench: Bench) -> Outcome:
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.1)
    said: list[str] = []
    loss = language_loss(bench.model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        said = [type(error).__name__, str(error).partition("[")[0]]
    assert said, "the step went unnoticed"
    del loss
    bench.model.zero_grad()
    return [*said, *train(bench)]


@case()
def one_element_written_through_numpy(bench: Bench) -> Outcome:
    losses = train(bench, steps=2)
    weight = bench.model.transformer.h[1].mlp.c_fc.weight
    weight.detach().numpy()[17, 23] += 3.0
    bench.refresh()
    return [*losses, *train(bench, steps=1, first=2)]


@case()
def gradients_switched_off_and_on(bench: Bench) -> Outcome:
    model = bench.model
    model.requires_grad_(False)
    evaluated = language_loss(model, 0)
    assert not evaluated.requires_grad
    model.lm_head.requires_grad_(True)
    losses = train(bench, steps=1)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return [evaluated, *losses, *train(bench, steps=2, first=1)]


# ---- two models -----------------------------------------------------------------------------------------------------


@case(TWO_GPT2)
def two_models_with_one_backward_through_both(bench: Bench) -> Outcome:
    first, second = bench.models
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in bench.models]
    seen: Outcome = []
    for index in range(3):
        torch.manual_seed(index)
        made = first(batch(index), output_hidden_states=True, use_cache=False).hidden_states[-1]
        loss = second(inputs_embeds=made, use_cache=False).logits.pow(2).mean()
        bench.assert_at_rest()
        loss.backward()
        bench.assert_at_rest()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append(loss.detach())
    return seen


@case(TWO_GPT2)
def a_generator_and_a_discriminator(bench: Bench) -> Outcome:
    generator, discriminator = bench.models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in bench.models]
    seen: Outcome = []
    for index in range(3):
        torch.manual_seed(index)
        fake = generator(batch(index), output_hidden_states=True, use_cache=False).hidden_states[-1]
        verdict = discriminator(inputs_embeds=fake.detach(), use_cache=False).logits.pow(2).mean()
        verdict.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        fooled = -discriminator(inputs_embeds=fake, use_cache=False).logits.pow(2).mean()
        fooled.backward()
        optimizers[0].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        seen += [verdict.detach(), fooled.detach()]
    return seen


@case(TWO_GPT2)
def a_student_and_its_teacher(bench: Bench) -> Outcome:
    teacher, student = bench.models
    teacher.eval()

    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(batch(index), use_cache=False).logits
        found = model(batch(index), use_cache=False).logits
        return F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")

    losses = train(Bench([student], bench.runs), loss_of)
    assert not gradients(teacher)
    return losses
