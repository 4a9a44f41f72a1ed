"""The cases of the window: typical user code around forward and backward, one function each.

Every function works on a bench and returns its results. The models' parameters are always compared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from support.benches import Bench, Body, Case, Outcome, Subject
from support.windows.window_subjects import GPT2, VOCABULARY, batch, hidden, language_loss

CASES: list[Case] = []
Loss = Callable[[nn.Module, int], torch.Tensor]


def case_of(cases: list[Case]) -> Callable[..., Callable[[Body], Body]]:
    """Makes a decorator that adds a function to the cases."""

    def case(subject: Subject = GPT2, **particulars: Any) -> Callable[[Body], Body]:
        def add(body: Body) -> Body:
            cases.append(Case(body.__name__, body, subject, **particulars))
            return body

        return add

    return case


case = case_of(CASES)


def train(bench: Bench, loss_of: Loss | None = None, *, steps: int = 3, first: int = 0) -> Outcome:
    """Runs a user's loop, and asserts between its lines that the models look like plain ones."""
    loss_of = loss_of or language_loss
    optimizer = torch.optim.AdamW(bench.model.parameters(), lr=1e-2)
    losses: Outcome = []
    for index in range(first, first + steps):
        torch.manual_seed(index)
        loss = loss_of(bench.model, index)
        bench.assert_at_rest()
        loss.backward()
        bench.assert_at_rest()
        torch.nn.utils.clip_grad_norm_(bench.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def gradients(model: nn.Module) -> Outcome:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# ---- loops ----------------------------------------------------------------------------------------------------------


@case()
def a_plain_loop(bench: Bench) -> Outcome:
    return train(bench)


@case()
def a_criterion_outside_the_model(bench: Bench) -> Outcome:
    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        logits = model(batch(index), use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch(index)[:, 1:].reshape(-1))

    return train(bench, loss_of)


@case()
def gradient_accumulation(bench: Bench) -> Outcome:
    optimizer = torch.optim.SGD(bench.model.parameters(), lr=0.1)
    seen: Outcome = []
    for to_none in (True, False, True):
        for index in range(3):
            torch.manual_seed(index)
            loss = language_loss(bench.model, index) / 3
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    return seen


@case(passes=3)
def two_forwards_and_one_backward(bench: Bench) -> Outcome:
    return train(bench, lambda model, index: language_loss(model, index) + language_loss(model, 7))


@case(passes=2)
def a_forward_whose_graph_is_dropped_and_one_that_is_kept(bench: Bench) -> Outcome:
    dropped = language_loss(bench.model, 0)
    kept = language_loss(bench.model, 1)
    del dropped
    return [*train(bench), kept.detach()]


@case()
def evaluation_and_generation_between_steps(bench: Bench) -> Outcome:
    model = bench.model
    model.eval()
    with torch.no_grad():
        logits = model(batch(0)).logits
    tokens = model.generate(batch(0), max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.train()
    return [logits, tokens, *train(bench)]


@case()
def checkpoints_that_are_not_reentrant(bench: Bench) -> Outcome:
    bench.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return train(bench)


@case()
def reentrant_checkpoints(bench: Bench) -> Outcome:
    bench.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    bench.model.enable_input_require_grads()
    return train(bench)


class Outer(nn.Module):
    """The offloaded model inside another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(VOCABULARY, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(tokens, use_cache=False).logits)


@case()
def inside_an_outer_module(bench: Bench) -> Outcome:
    torch.manual_seed(5)
    outer = Outer(bench.model)
    losses = train(Bench([outer], bench.runs), lambda model, index: model(batch(index)).pow(2).mean())
    return [*losses, *(parameter.detach() for parameter in outer.head.parameters())]


@case()
def a_submodule_called_directly(bench: Bench) -> Outcome:
    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        return model.lm_head(model.transformer(batch(index), use_cache=False).last_hidden_state).pow(2).mean()

    return train(bench, loss_of)


@case()
def gradients_stay_the_same_tensors_over_backwards(bench: Bench) -> Outcome:
    model = bench.model
    known = [id(parameter) for parameter in model.parameters()]
    torch.manual_seed(0)
    loss = language_loss(model, 0)
    assert [id(parameter) for parameter in model.parameters()] == known
    loss.backward()
    assert [id(parameter) for parameter in model.parameters()] == known
    first = [parameter.grad for parameter in model.parameters()]
    once = [gradient.clone() for gradient in first]
    model.zero_grad(set_to_none=False)
    torch.manual_seed(0)
    language_loss(model, 0).backward()
    assert all(a is parameter.grad for a, parameter in zip(first, model.parameters(), strict=True))
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    return [*once, *first]


# ---- threads --------------------------------------------------------------------------------------------------------


def in_threads(work: Callable[[int], torch.Tensor], count: int, *, together: bool = True) -> list[torch.Tensor]:
    results: list[torch.Tensor | None] = [None] * count

    def run(index: int) -> None:
        results[index] = work(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    assert all(result is not None for result in results), "a thread failed"
    return results


@case(passes=2)
def forwards_without_gradients_in_threads(bench: Bench) -> Outcome:
    bench.model.eval()

    def logits(index: int) -> torch.Tensor:
        with torch.no_grad():
            return bench.model(batch(index)).logits

    found = in_threads(logits, 4)
    bench.model.train()
    return [*found, *train(bench)]


@case(passes=3)
def forwards_in_threads_and_one_backward(bench: Bench) -> Outcome:
    bench.model.eval()
    losses = in_threads(lambda index: language_loss(bench.model, index), 3)
    sum(losses).backward()
    return [*(loss.detach() for loss in losses), *gradients(bench.model)]


@case(passes=3)
def backwards_in_other_threads(bench: Bench) -> Outcome:
    bench.model.eval()
    losses = [language_loss(bench.model, index) for index in range(3)]

    def backward(index: int) -> torch.Tensor:
        losses[index].backward()
        return losses[index].detach()

    return [*in_threads(backward, 3, together=False), *gradients(bench.model)]


# ---- functional calls -----------------------------------------------------------------------------------------------


def call_with(model: nn.Module, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = batch(0)
    return torch.func.functional_call(model, parameters, (tokens,), {"labels": tokens, "use_cache": False}).loss


@case()
def a_functional_call_with_the_models_own_parameters(bench: Bench) -> Outcome:
    loss = call_with(bench.model, dict(bench.model.named_parameters()))
    loss.backward()
    return [loss.detach(), *gradients(bench.model)]


@case(passes=4, foreign=True)
def a_functional_call_with_other_parameters(bench: Bench) -> Outcome:
    bench.model.eval()
    others = {name: (p.detach() * 1.5).requires_grad_() for name, p in bench.model.named_parameters()}
    loss = call_with(bench.model, others)
    found = torch.autograd.grad(loss, list(others.values()))
    return [loss.detach(), *found, *train(bench)]


@case(passes=4, foreign=True)
def a_functional_gradient(bench: Bench) -> Outcome:
    bench.model.eval()
    parameters = {name: parameter.detach().clone() for name, parameter in bench.model.named_parameters()}
    found = torch.func.grad(lambda values: call_with(bench.model, values))(parameters)
    return [*found.values(), *train(bench)]


# ---- autograd -------------------------------------------------------------------------------------------------------


@case(passes=3)
def gradients_with_respect_to_parameters(bench: Bench) -> Outcome:
    return list(torch.autograd.grad(language_loss(bench.model, 0), list(bench.model.parameters())))


@case()
def a_backward_for_one_parameter_only(bench: Bench) -> Outcome:
    language_loss(bench.model, 0).backward(inputs=[bench.model.lm_head.weight])
    assert len(gradients(bench.model)) == 1
    return gradients(bench.model)


@case()
def gradients_with_respect_to_inputs(bench: Bench) -> Outcome:
    embeddings = hidden(0).requires_grad_()
    torch.manual_seed(2)
    output = bench.model(inputs_embeds=embeddings, use_cache=False).logits.pow(2).sum()
    return [*torch.autograd.grad(output, [embeddings]), *train(bench)]


@case()
def a_backward_through_inputs_of_the_users(bench: Bench) -> Outcome:
    embeddings = hidden(0).requires_grad_()
    torch.manual_seed(2)
    bench.model(inputs_embeds=embeddings, use_cache=False).logits.pow(2).mean().backward()
    return [embeddings.grad, *gradients(bench.model)]


@case(passes=2)
def a_graph_kept_for_a_second_backward(bench: Bench) -> Outcome:
    loss = language_loss(bench.model, 0)
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(bench.model)


@case(passes=4)
def a_double_backward(bench: Bench) -> Outcome:
    bench.model.set_attn_implementation("eager")
    bench.model.eval()
    embeddings = hidden(0).requires_grad_()
    output = bench.model(inputs_embeds=embeddings, use_cache=False).logits.pow(2).sum()
    (gradient,) = torch.autograd.grad(output, [embeddings], create_graph=True)
    gradient.pow(2).sum().backward()
    return [gradient.detach(), *gradients(bench.model)]


@case()
def outputs_changed_in_place_and_through_views(bench: Bench) -> Outcome:
    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        logits = model(batch(index), use_cache=False).logits
        view = logits.view(-1, VOCABULARY)
        view.mul_(2)
        logits.add_(1)
        return view.pow(2).mean()

    return train(bench, loss_of)


@case()
def a_loss_from_a_nested_output(bench: Bench) -> Outcome:
    def loss_of(model: nn.Module, index: int) -> torch.Tensor:
        return model(batch(index), use_cache=False, output_hidden_states=True).hidden_states[1].pow(2).mean()

    return train(bench, loss_of)


def loss_of_an_inner_activation(model: nn.Module, index: int) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def keep(_module: nn.Module, _args: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handle = model.transformer.h[0].register_forward_hook(keep)
    model(batch(index), use_cache=False)
    handle.remove()
    return kept[0].pow(2).mean()


@case()
def a_loss_from_an_activation_that_is_no_output(bench: Bench) -> Outcome:
    return train(bench, loss_of_an_inner_activation)


@case()
def a_loss_from_an_activation_inside_checkpoints(bench: Bench) -> Outcome:
    bench.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return train(bench, loss_of_an_inner_activation)


@case()
def a_loss_from_an_activation_of_a_root_with_detached_output(bench: Bench) -> Outcome:
    handle = bench.model.register_forward_hook(lambda _module, _args, output: output.logits.detach())
    losses = train(bench, loss_of_an_inner_activation)
    handle.remove()
    return losses
