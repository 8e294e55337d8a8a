"""The model for questions of the paper on scalar encodings (Wu et al. 2021), a QANet without convolutions; averaged weights."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lagwise.encodings.at5 import AT5
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch
from lagwise.lab.tasks.models import encoder_of
from lagwise.lab.tasks.text.windows import Frame


class QANet(nn.Module):
    """The model of the paper on scalar encodings: a QANet without convolutions, so that the encoding is all that knows order.

    Five encoders: one layer for the question and one for the paragraph, and three stacks of `config.layers`, one on the other.
    Scores of the start are made of the first and the second, those of the end of the first and the third. AT5 has its slopes in
    common in all five.
    """

    def __init__(self, config: Config, *, symbols: int, frame: Frame):
        super().__init__()
        self.before, self.middle = len(frame.before), len(frame.middle)
        self.embedding = nn.Embedding(symbols, config.dim)
        shallow = replace(config, layers=1)
        self.encoders = nn.ModuleList(encoder_of(each) for each in (shallow, shallow, config, config, config))
        share_slopes([encoder.encoding for encoder in self.encoders])
        self.between = ContextQueryAttention(config.dim)
        self.start, self.end = nn.Linear(2 * config.dim, 1), nn.Linear(2 * config.dim, 1)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, batch: Batch) -> Float[Tensor, "batch time 2"]:
        asked, reads, *stacks = self.encoders
        sizes, question_sizes = batch["last"] - batch["first"], batch["first"] - self.before - self.middle
        x = self.dropout(self.embedding(batch["tokens"]))
        question, _ = cut_part(x, torch.full_like(question_sizes, self.before), question_sizes)
        context, places = cut_part(x, batch["first"], sizes)
        question, context = asked(question, lengths=question_sizes), reads(context, lengths=sizes)
        x = self.between(context, question, sizes, question_sizes)
        found = []
        for stack in stacks:
            x = stack(self.dropout(x), lengths=sizes)
            found.append(x)
        ends = [self.start(torch.cat([found[0], found[1]], dim=-1)), self.end(torch.cat([found[0], found[2]], dim=-1))]
        scores = torch.cat(ends, dim=-1)
        length = batch["tokens"].shape[1]
        whole = scores.new_zeros(len(scores), length + scores.shape[1], 2)
        return whole.scatter(1, places[..., None].expand_as(scores), scores)[:, :length]


def cut_part(
    x: Float[Tensor, "batch time dim"], first: Int[Tensor, " batch"], sizes: Int[Tensor, " batch"]
) -> tuple[Float[Tensor, "batch part dim"], Int[Tensor, "batch part"]]:
    """Returns the vectors from `first` on, as many as the longest part has, and their places, which may be beyond the end."""
    places = first[:, None] + torch.arange(max(1, int(sizes.max())), device=x.device)
    inside = places.clamp(max=x.shape[1] - 1)
    return x.gather(1, inside[..., None].expand(-1, -1, x.shape[2])), places


def share_slopes(encodings: Iterable[Any]) -> None:
    """Gives all AT5 encodings the slopes of the first."""
    adaptive = [encoding for encoding in encodings if isinstance(encoding, AT5)]
    for encoding in adaptive[1:]:
        encoding.slope = adaptive[0].slope


class ContextQueryAttention(nn.Module):
    """Attention from a paragraph to a question and back, with a similarity that is linear in both and in their product.

    c' = W [c, a, c a, c b],   a = S q,   b = S T^T c,   S and T the softmax of u c + v q + w (c q) over the question and over the
    paragraph.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.similarity = nn.Parameter(torch.randn(3, dim) / dim**0.5)
        self.merge = nn.Linear(4 * dim, dim)

    def forward(
        self,
        context: Float[Tensor, "batch context dim"],
        question: Float[Tensor, "batch question dim"],
        sizes: Int[Tensor, " batch"],
        question_sizes: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch context dim"]:
        u, v, w = self.similarity
        similar = (context @ u)[:, :, None] + (question @ v)[:, None] + (context * w) @ question.mT
        least = torch.finfo(similar.dtype).min
        there, asked = length_mask(context, sizes), length_mask(question, question_sizes)
        to_question = similar.masked_fill(~asked[:, None], least).softmax(2)
        to_context = similar.masked_fill(~there[:, :, None], least).softmax(1)
        a = to_question @ question
        b = to_question @ (to_context.mT @ context)
        return self.merge(torch.cat([context, a, context * a, context * b], dim=-1))


def length_mask(x: Float[Tensor, "batch time dim"], sizes: Int[Tensor, " batch"]) -> Bool[Tensor, "batch time"]:
    """Returns which vectors are no padding."""
    return torch.arange(x.shape[1], device=x.device) < sizes[:, None]


class Averaged(nn.Module):
    """A model that is evaluated with the exponential moving average of its weights.

    The average is taken before each step, so that the last step is not in it. In the first steps it decays faster, by
    (1 + n) / (10 + n) after n of them. It needs whole weights, and so no sharded ones.
    """

    steps: Tensor

    def __init__(self, model: nn.Module, decay: float):
        super().__init__()
        self.inner, self.decay = model, decay
        self.averages = nn.Module()
        for name, parameter in model.named_parameters():
            # A buffer's name has no dots.
            self.averages.register_buffer(name.replace(".", "/"), parameter.detach().clone())
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, batch: Batch) -> Any:
        if self.training:
            self.update()
            return self.inner(batch)
        averages = {name.replace("/", "."): x for name, x in self.averages.named_buffers()}
        return torch.func.functional_call(self.inner, averages, (batch,))

    @torch.no_grad()
    def update(self) -> None:
        """Moves the averages towards the weights."""
        weight = 1.0 - ((1.0 + self.steps) / (10.0 + self.steps)).clamp(max=self.decay)
        for average, parameter in zip(self.averages.buffers(), self.inner.parameters(), strict=True):
            average.lerp_(parameter, weight.to(average.dtype))
        self.steps += 1
