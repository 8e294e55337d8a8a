"""`lagwise bench hf`: training and inference of Hugging Face models with "lagwise", beside what they run without us."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel, T5Config, T5EncoderModel, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from lagwise.hf import NAME, Mask, restore_relative
from lagwise.hf.bert import TABLE, self_attentions
from lagwise.lab.bench.baselines import m4_logits, pairwise_lags
from lagwise.lab.bench.cases import make_records, shape_of, words_of
from lagwise.lab.bench.timing import Measured, error_words, measure, ratios

BERT_4 = "transformers 4 eager"
"""BERT with relative positions as transformers 4.57 computed it; no other attention of transformers 5 computes them."""

FLOOR = "no positions"
"""T5 on torch's attention without a bias: what a position encoding that costs nothing would take."""

T5_BASE = {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
T5_SMALL = {"vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
BERT_BASE = {
    "vocab_size": 30522, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
}  # fmt: skip
BERT_SMALL = {
    "vocab_size": 30522, "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048,
}  # fmt: skip

MODELS: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "t5-base": (T5ForConditionalGeneration, T5_BASE),
    "t5-base-encoder": (T5EncoderModel, T5_BASE),
    "bert-base-m4": (BertForMaskedLM, BERT_BASE),
    "t5-small": (T5ForConditionalGeneration, T5_SMALL),
    "t5-small-encoder": (T5EncoderModel, T5_SMALL),
    "bert-small-m4": (BertForMaskedLM, BERT_SMALL),
}
"""The models that are measured, with random weights: their classes, and the sizes in their configs."""

SHARPNESS = 4.0
"""The spread of the position tables. With that of an untrained model positions hardly matter, and a wrong one would not show."""

BOUNDS = {
    torch.float64: (1e-3, 1e-2), torch.float32: (1e-3, 1e-2), torch.float16: (5e-3, 0.05), torch.bfloat16: (1e-2, 0.1),
}  # fmt: skip
"""How far two contenders may be apart in their loss, and in their outputs as a share of the norm.

Rounding in bfloat16 makes about 0.001 and 0.015; without positions it is about 0.01 and 0.3.
"""


@dataclass(frozen=True)
class ModelCase:
    """One model and the shape of its batch.

    Args:
        model: A name of `MODELS`.
        time: The length of all sequences; in an encoder-decoder, of both sides.
        dropout: Of attention weights and of hidden states alike.
        goal: How many times the tokens per second of the anchor we promise in training.
        memory_goal: Which share of the anchor's memory in training we promise at most.
        floor_goal: How many times the training time without positions we promise at most.
    """

    model: str
    batch: int
    time: int
    dropout: float = 0.0
    goal: float | None = None
    memory_goal: float | None = None
    floor_goal: float | None = None

    @property
    def words(self) -> str:
        return words_of(asdict(self))

    @property
    def shape(self) -> str:
        return shape_of(asdict(self))

    @property
    def anchor(self) -> str:
        """What ratios and goals are taken to."""
        return BERT_4 if MODELS[self.model][0] is BertForMaskedLM else "sdpa"

    @property
    def unlike(self) -> str:
        """The contender that computes something else than the others, for reference."""
        return "sdpa" if self.anchor == BERT_4 else FLOOR

    def at(self, batch: int | None, time: int | None) -> "ModelCase":
        """Returns the case in another shape, without its goals.

        >>> ModelCase("t5-base", 8, 4096, goal=3.0).at(None, 512)
        ModelCase(model='t5-base', batch=8, time=512, dropout=0.0, goal=None, memory_goal=None, floor_goal=None)
        """
        if batch is None and time is None:
            return self
        return replace(self, batch=batch or self.batch, time=time or self.time, goal=None, memory_goal=None, floor_goal=None)


CASES = {
    "cpu": [
        ModelCase("t5-small", 1, 512),
        ModelCase("t5-small", 1, 512, 0.1),
        ModelCase("t5-small-encoder", 1, 512),
        ModelCase("bert-small-m4", 1, 512),
        ModelCase("bert-small-m4", 1, 512, 0.1),
    ],
    "cuda": [
        ModelCase("t5-base", 64, 64, floor_goal=1.15),
        ModelCase("t5-base", 32, 128, floor_goal=1.15),
        ModelCase("t5-base", 16, 512, floor_goal=1.15),
        ModelCase("t5-base", 4, 2048, floor_goal=1.15),
        ModelCase("t5-base", 8, 4096, goal=3.0, memory_goal=0.5),
        ModelCase("t5-base", 8, 4096, 0.1, goal=3.0, memory_goal=0.5),
        # With 8 sequences "eager" and "sdpa" need more memory than there is.
        ModelCase("t5-base", 2, 4096, goal=3.0, memory_goal=0.5, floor_goal=1.15),
        ModelCase("t5-base", 2, 4096, 0.1, goal=3.0, memory_goal=0.5),
        # Without the head, whose logits are most of the memory of ours.
        ModelCase("t5-base-encoder", 8, 4096),
        ModelCase("t5-base-encoder", 8, 4096, 0.1),
        ModelCase("bert-base-m4", 32, 512, goal=5.0),
        ModelCase("bert-base-m4", 32, 512, 0.1, goal=5.0),
    ],
}


@dataclass(frozen=True)
class ModelBatch:
    """What a model is given: its inputs, and labels if it has a head."""

    inputs: dict[str, Tensor]
    labels: Tensor | None

    @property
    def tokens(self) -> int:
        """All that go into the model, on the side of the encoder and of the decoder."""
        return sum(x.numel() for x in self.inputs.values())

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.inputs.values(), *([] if self.labels is None else [self.labels])]


@dataclass(frozen=True)
class Answer:
    """What a model says without dropout: its loss in float32, and the output of its first sequence."""

    loss: float
    output: Tensor


def measure_model(
    case: ModelCase,
    *,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int,
    quick: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> list[dict[str, Any]]:
    """Measures one case and returns a record for each contender.

    All contenders have the same weights, of type `dtype`. Those that compute the same are first compared without dropout, and
    a RuntimeError is raised if they do not agree.

    Args:
        quick: Leave out all but ours, the anchor, and T5 without positions.
    """
    torch.manual_seed(0)
    batch, models = make_batch(case, device), make_models(case, device, dtype)
    if quick:
        models = {name: model for name, model in models.items() if name in (case.anchor, NAME, FLOOR)}
    facts = compare_answers(case, models, batch, dtype, progress)
    ready = {name: model.train() for name, model in models.items() if "error" not in facts[name]}
    training = measure({name: training_step(model, batch) for name, model in ready.items()}, device, repeats, progress)
    # What does not train is not timed in inference: the numbers of a line belong together.
    ready = {name: model.eval() for name, model in ready.items() if training[name].error is None}
    inference = measure({name: inference_step(model, batch) for name, model in ready.items()}, device, repeats, progress)
    held = {name: size_of([*model.parameters(), *model.buffers(), *batch.tensors]) for name, model in models.items()}
    numbers = numbers_of(case, batch, training, inference, held)
    for name in models:
        facts[name] |= numbers.get(name, {}) | goals_met(case, name, numbers.get(name, {}))
        facts[name]["transformers"] = metadata.version("transformers")
        if batch.labels is not None and "held_bytes" in facts[name]:
            # One copy; the loss and its gradient have one each too. It is the same for all, whatever their attention.
            logits = batch.labels.numel() * MODELS[case.model][1]["vocab_size"] * dtype.itemsize
            facts[name] |= {"logits_bytes": logits, "logits_share": logits / facts[name]["held_bytes"]}
    return make_records("hf", dict.fromkeys(models, case), facts, device, dtype, repeats)


def numbers_of(
    case: ModelCase, batch: ModelBatch, training: dict[str, Measured], inference: dict[str, Measured], held: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Returns the numbers of each contender that was measured, or its error.

    A speedup is the ratio of tokens per second to the anchor's in the same turn, and `memory_ratio` that of `held_bytes`: the
    peak of a training step with the weights and the batch. `floor_ratio` is the time of training by that without positions.
    """
    training_ratios, inference_ratios = (
        ratios(measured, case.anchor) if case.anchor in measured else {} for measured in (training, inference)
    )
    floor_ratios = ratios(training, FLOOR) if FLOOR in training else {}
    base = held[case.anchor] + training[case.anchor].peak if case.anchor in training_ratios else None
    numbers: dict[str, dict[str, Any]] = {}
    for name, trained in training.items():
        if trained.error is not None or inference[name].error is not None:
            numbers[name] = {"error": trained.error or inference[name].error}
            continue
        peak = trained.peak + held[name]
        numbers[name] = {
            "tokens": batch.tokens,
            "training_tokens_per_s": batch.tokens / trained.median,
            "inference_tokens_per_s": batch.tokens / inference[name].median,
            "training_ms": 1000 * trained.median,
            "inference_ms": 1000 * inference[name].median,
            "training_speedup": 1.0 / training_ratios[name] if name in training_ratios else None,
            "inference_speedup": 1.0 / inference_ratios[name] if name in inference_ratios else None,
            "floor_ratio": floor_ratios.get(name),
            "peak_bytes": trained.peak,
            "held_bytes": peak,
            "inference_held_bytes": inference[name].peak + held[name],
            "memory_ratio": peak / base if base else None,
            "turns": len(trained.seconds),
        }
    return numbers


def goals_met(case: ModelCase, name: str, numbers: dict[str, Any]) -> dict[str, bool | None]:
    """Says whether ours meets the goals of a case; None where there is no goal, or no number to hold against it."""
    speedup, memory, floor = (numbers.get(each) for each in ("training_speedup", "memory_ratio", "floor_ratio"))
    promised = name == NAME
    return {
        "goal_met": speedup >= case.goal if promised and case.goal and speedup else None,
        "memory_goal_met": memory <= case.memory_goal if promised and case.memory_goal and memory else None,
        "floor_goal_met": floor <= case.floor_goal if promised and case.floor_goal and floor else None,
    }


def make_batch(case: ModelCase, device: torch.device) -> ModelBatch:
    """Returns random tokens without padding."""
    kind, sizes = MODELS[case.model]

    def tokens() -> Tensor:
        return torch.randint(sizes["vocab_size"], (case.batch, case.time), device=device)

    inputs = {"input_ids": tokens()}
    if kind is T5ForConditionalGeneration:
        inputs["decoder_input_ids"] = tokens()
    return ModelBatch(inputs, None if kind is T5EncoderModel else tokens())


def make_models(case: ModelCase, device: torch.device, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """Returns the contenders by name: one model, and copies of it that share its weights."""
    kind, sizes = MODELS[case.model]
    with torch.device(device):
        if kind is BertForMaskedLM:
            return make_berts(sizes, case, dtype)
        # Nobody decodes here, and the cache would be memory for all.
        model: Any = kind(T5Config(**sizes, dropout_rate=case.dropout, use_cache=False))
        model.to(dtype)
    for name, weight in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(weight, std=SHARPNESS)
    models = {name: twin(model) for name in ("eager", "sdpa", NAME)}
    for name, each in models.items():
        # One by one: in transformers 5.17 a model does not tell its stacks, which would stay with "sdpa".
        for part in each.modules():
            if isinstance(part, PreTrainedModel):
                part.set_attn_implementation(name)
    return models | {FLOOR: without_positions(models["sdpa"])}


def without_positions(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a T5 on torch's attention that shares its weights and makes no bias."""
    plain = twin(model)
    for layer in plain.modules():
        if isinstance(layer, T5Attention):
            # A layer that has a bias asks for it, and one without would make zeros.
            layer.has_relative_attention_bias = True
            layer.compute_bias = no_bias
    return plain


def no_bias(*sizes: Any, **options: Any) -> None:
    """Makes no bias."""


def make_berts(sizes: dict[str, Any], case: ModelCase, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """Returns BERTs with relative positions, and for reference one with absolute positions instead."""
    dropout = {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
    places = {"max_position_embeddings": case.time, "position_embedding_type": "relative_key_query"}
    config = BertConfig(**sizes, **dropout, **places)
    absolute: Any = BertForMaskedLM(config)
    absolute.to(dtype)
    absolute.set_attn_implementation("sdpa")
    ours, width = twin(absolute), config.hidden_size // config.num_attention_heads
    names = [name for name, _ in self_attentions(ours)]
    restore_relative(ours, {f"{name}.{TABLE}": SHARPNESS * torch.randn(2 * case.time - 1, width) for name in names})
    eager = twin(ours)
    for name, layer in list(self_attentions(eager)):
        eager.set_submodule(name, WrittenOut(layer))
    return {BERT_4: eager, "sdpa": absolute, NAME: ours}


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model that shares its weights, so that contenders need not be switched between turns."""
    return deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


class WrittenOut(nn.Module):
    """The self-attention of a BERT with `relative_key_query` as in transformers 4.57, a vector for each pair of positions.

    What is left out is the sum with a mask of zeros that it added where there was no padding, which only helps it.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, attention_mask: Mask | None = None, **options: Any) -> tuple[Tensor, None]:
        if attention_mask is not None and not (attention_mask.key_mask is None and attention_mask.lengths is None):
            raise ValueError("attention_mask must be None, but hides keys: this baseline knows no padding")
        layer, heads = self.layer, self.layer.num_attention_heads
        q, k, v = (
            project(hidden_states).unflatten(-1, (heads, -1)).transpose(1, 2) for project in (layer.query, layer.key, layer.value)
        )
        # The rows of the table are distances into the past.
        middle = layer.distance_embedding.num_embeddings // 2
        vectors = layer.distance_embedding(middle - pairwise_lags(q))
        weights = layer.dropout(torch.softmax(m4_logits(q, k, vectors), dim=-1))
        return (weights @ v).transpose(1, 2).flatten(2), None


def training_step(model: PreTrainedModel, batch: ModelBatch) -> Callable[[], object]:
    """Returns forward and backward with the gradients of all weights, without an optimizer."""
    learned = list(model.parameters())

    def step() -> None:
        out = model(**batch.inputs) if batch.labels is None else model(**batch.inputs, labels=batch.labels)
        loss = out.last_hidden_state.mean() if batch.labels is None else out.loss
        # Not `backward`, whose gradients of the step before would be freed in this one and be missing from its memory.
        torch.autograd.grad(loss, learned, allow_unused=True)

    return step


def inference_step(model: PreTrainedModel, batch: ModelBatch) -> Callable[[], object]:
    """Returns a forward pass without gradients and without a loss."""

    def step() -> None:
        with torch.no_grad():
            model(**batch.inputs)

    return step


@torch.no_grad()
def answer(model: PreTrainedModel, batch: ModelBatch) -> Answer:
    """Returns what a model says without dropout. The model's own loss has its weights' type, too coarse to be compared."""
    output = model.eval()(**batch.inputs)[0]
    if batch.labels is None:
        return Answer(float(output.mean(dtype=torch.float32)), output[0].float())
    losses = [F.cross_entropy(logits.float(), labels) for logits, labels in zip(output, batch.labels, strict=True)]
    return Answer(float(torch.stack(losses).mean()), output[0].float())


def compare_answers(
    case: ModelCase, models: dict[str, PreTrainedModel], batch: ModelBatch, dtype: torch.dtype, progress: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Returns the loss of each contender and how far it is from the anchor's, or its error; raises if they do not agree.

    The anchor is the first that answers, where the anchor itself does not. A BERT with absolute positions has none, and neither
    has a T5 without positions.
    """
    facts: dict[str, dict[str, Any]] = {}
    reference: tuple[str, Answer] | None = None
    for name in sorted(models, key=lambda name: name != case.anchor):
        progress(f"{name}, compared")
        try:
            found = answer(models[name], batch)
        except Exception as error:
            facts[name] = {"error": error_words(error)}
            continue
        facts[name] = {"loss": found.loss, "loss_difference": None, "output_difference": None}
        if name == case.unlike:
            continue
        if reference is None:
            reference = name, found
        facts[name] |= differences(name, found, *reference, bounds=BOUNDS[dtype])
    return facts


def differences(name: str, found: Answer, other: str, expected: Answer, *, bounds: tuple[float, float]) -> dict[str, float]:
    """Returns how far two answers are apart, in their loss and in their output; raises if that is too far."""
    loss = abs(found.loss - expected.loss)
    output = float((found.output - expected.output).norm() / expected.output.norm())
    # A NaN is not within any bound.
    if not (loss <= bounds[0] and output <= bounds[1]):
        raise RuntimeError(
            f"{name} must compute the same as {other}, but its loss is off by {loss:.3g} (at most {bounds[0]}) and its output by "
            f"{output:.3g} of its norm (at most {bounds[1]}): one of them is wrong, and their times mean nothing"
        )
    return {"loss_difference": loss, "output_difference": output}


def size_of(tensors: list[Tensor]) -> int:
    """Returns the bytes of tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)
