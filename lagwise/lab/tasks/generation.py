"""Generation: tokens that follow a prompt, drawn one by one from a causal model."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lagwise.lab.tasks.base import Sampling
from lagwise.lab.tasks.models import CausalModel


class GeneratedTokens(NamedTuple):
    """What was drawn from a model."""

    tokens: Int[Tensor, "batch length"]
    """With the prompts."""
    log_probabilities: Float[Tensor, "batch new"]
    """Of the drawn tokens, in nats, as the model gives them: before temperature, nucleus and masks."""


Allowed = Callable[[Int[Tensor, "batch time"]], Bool[Tensor, "batch symbols"]]
"""Which tokens may come next."""


@torch.no_grad()
def generate_tokens(
    model: CausalModel,
    prompts: Int[Tensor, "batch time"],
    sampling: Sampling,
    *,
    allowed: Allowed | None = None,
    end: int | None = None,
) -> GeneratedTokens:
    """Draws tokens that follow the prompts, token by token, from the cache or the recurrent state of linear attention.

    The same seed draws the same tokens on the same device.

    Args:
        model: In evaluation mode.
        prompts: At least one token in each row.
        sampling: Temperature, nucleus, seed and length; the number of rows is that of the prompts.
        allowed: Is given all tokens so far and tells those that may come next; any unless given.
        end: A token after which a row is over: it is repeated to the end.
    """
    check_sampling(model, prompts, sampling)
    rng = torch.Generator(prompts.device).manual_seed(sampling.seed)
    tokens = prompts.new_empty(len(prompts), sampling.length)
    tokens[:, : prompts.shape[1]] = prompts
    over = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
    found, new, cache = [], prompts, model.encoder.new_cache()
    for time in range(prompts.shape[1], sampling.length):
        scores = model.step(new, cache).float()
        choice = draw_tokens(scores, sampling, rng, None if allowed is None else allowed(tokens[:, :time]))
        choice = choice if end is None else torch.where(over, end, choice)
        found.append(scores.log_softmax(1).gather(1, choice[:, None])[:, 0])
        tokens[:, time], new = choice, choice[:, None]
        if end is not None:
            over |= choice == end
            if bool(over.all()):
                tokens = tokens[:, : time + 1]
                break
    return GeneratedTokens(tokens, torch.stack(found, dim=1))


def check_sampling(model: nn.Module, prompts: Tensor, sampling: Sampling) -> None:
    """Raises for what nothing can be drawn with."""
    if model.training:
        raise ValueError("model must be in evaluation mode, but is in training, where it is random: call model.eval()")
    if not prompts.shape[1]:
        raise ValueError("prompts must have at least one token in each row, but are empty: begin with the end of a document")
    if sampling.length <= prompts.shape[1]:
        raise ValueError(
            f"length must be more than the {prompts.shape[1]} tokens of the prompt, which it includes, but is {sampling.length}"
        )
    if sampling.temperature < 0.0:
        raise ValueError(f"temperature must be at least 0, but is {sampling.temperature}")
    if not 0.0 < sampling.nucleus <= 1.0:
        raise ValueError(f"nucleus must be above 0 and at most 1, but is {sampling.nucleus}")


def draw_tokens(
    scores: Float[Tensor, "batch symbols"],
    sampling: Sampling,
    rng: torch.Generator,
    allowed: Bool[Tensor, "batch symbols"] | None = None,
) -> Int[Tensor, " batch"]:
    """Returns a token for each row, drawn by temperature and nucleus from those that are allowed."""
    if allowed is not None:
        if not bool(allowed.any(1).all()):
            raise ValueError("allowed must leave at least one token in each row, but leaves none")
        scores = scores.masked_fill(~allowed, -torch.inf)
    if sampling.temperature == 0.0:
        return scores.argmax(1)
    return torch.multinomial(in_nucleus(scores / sampling.temperature, sampling.nucleus), 1, generator=rng)[:, 0]


def in_nucleus(scores: Float[Tensor, "batch symbols"], nucleus: float) -> Float[Tensor, "batch symbols"]:
    """Returns the probabilities of the likeliest tokens that together have a probability, and 0 for the others; no sum is 1.

    >>> in_nucleus(torch.tensor([[0.5, 0.3, 0.2]]).log(), 0.7)
    tensor([[0.5000, 0.3000, 0.0000]])
    """
    shares = scores.softmax(1)
    if nucleus == 1.0:
        return shares
    ordered, places = shares.sort(1, descending=True)
    before = ordered.cumsum(1) - ordered
    return torch.zeros_like(shares).scatter(1, places, ordered * (before < nucleus))
