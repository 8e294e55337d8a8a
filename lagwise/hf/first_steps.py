"""The first steps of a model: the kernels that it needs are made by a copy of it with few layers and weights of no meaning."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import product
from os import PathLike
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from lagwise.hf.bert import TYPES, add_tables
from lagwise.hf.conversion import convert, last_position
from lagwise.hf.masks import NAME
from lagwise.warming import TIMES, Step, Warmed, Watch, check_calls, check_gpu, in_float32, take_steps

LAYERS = 2
"""The first layer of a T5 makes the bias, and another one is given it."""

COUNTS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layer", "n_layers")
"""What configs call their numbers of layers."""


def warmup(
    model: str | PathLike[str] | PreTrainedConfig,
    encoding: str | None = None,
    *,
    times: Sequence[int] = TIMES,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
    batch: int = 2,
    padded: bool = True,
    training: bool = True,
    autocast: bool | None = None,
    jobs: int | None = None,
    watch: Watch = lambda words, done, of: None,
    **options: Any,
) -> Warmed:
    """Makes the kernels that a model of transformers needs on the current GPU with `attn_implementation="lagwise"`.

    Its config is enough: no weights are loaded.

    Args:
        model: A folder, a name on the Hub, or a config.
        encoding: The encoding that `convert` gives to the model; its own positions unless given.
        times: Lengths, in an encoder-decoder of both sides.
        dtypes: Types of the products.
        batch: Sequences of a batch.
        padded: Make those for batches with padding too.
        training: Make those of gradients. Otherwise those of generation, where the model generates.
        autocast: Leave weights float32 and let autocast cast; unless given, in training.
        jobs: Batches at the same time.
        watch: Is told what was done, how many batches are done, and of how many.
        options: Options of the encoding.
    """
    check_calls(times, batch, padded, training)
    check_gpu()
    small = small_model(model, encoding, options)
    most = last_position(small)
    if max(times) > most:
        raise ValueError(f"times must be at most {most:,}, for which the model has positions, but {max(times):,} is among them")
    steps = [
        Step(words, partial(step, deepcopy(small), dtype, training, in_float32(autocast, training), inputs))
        for dtype, time in product(dtypes, times)
        for words, inputs in batches_of(small, batch, time, padded, dtype)
    ]
    return take_steps(steps, jobs, watch)


def small_model(
    model: str | PathLike[str] | PreTrainedConfig, encoding: str | None = None, options: dict[str, Any] | None = None
) -> PreTrainedModel:
    """Returns a model with few layers and random weights, without a head, whose attention is ours."""
    config = deepcopy(model) if isinstance(model, PreTrainedConfig) else AutoConfig.from_pretrained(model)
    relative = getattr(config, "position_embedding_type", None) in TYPES
    made: Any = AutoModel.from_config(with_few_layers(config))
    if relative:
        add_tables(made)
    if encoding is not None:
        return convert(made, encoding, **(options or {}))
    if options:
        raise ValueError(f"options of an encoding must be left out without one, but {', '.join(options)} are given")
    for part in made.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(NAME)
    return made


def with_few_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Cuts a config down to LAYERS, in place, and returns it."""
    for name in COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int) and count > LAYERS:
            setattr(config, name, LAYERS)
    kinds = getattr(config, "layer_types", None)
    if isinstance(kinds, list):
        config.layer_types = kinds[:LAYERS]
    return config


def batches_of(
    model: PreTrainedModel, batch: int, time: int, padded: bool, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yields the batches of a length, in words and as what the model is given: one without padding, and one with some."""
    tokens = torch.zeros(batch, time, dtype=torch.int64)
    both = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    words = f"{str(dtype).removeprefix('torch.')} T{time}"
    yield words, {"input_ids": tokens, **both}
    if padded:
        mask = torch.ones(batch, time, dtype=torch.int64)
        mask[0, time - 1 :] = 0
        yield f"{words} padded", {"input_ids": tokens, "attention_mask": mask, **both}


def step(
    model: Any, dtype: torch.dtype, training: bool, float32: bool, inputs: dict[str, torch.Tensor],
    device: torch.device,
) -> None:  # fmt: skip
    """Takes a training step on a device, or reads a batch and generates a token."""
    model = model.to(device, torch.float32 if float32 else dtype).train(training)
    inputs = {name: x.to(device) for name, x in inputs.items()}
    casts = float32 and dtype != torch.float32
    with torch.set_grad_enabled(training), torch.autocast(device.type, dtype, enabled=casts):
        out = model(**inputs)
        if not training and getattr(out, "past_key_values", None) is not None:
            model(**next_inputs(inputs, out))
    if training:
        out[0].float().sum().backward()


def next_inputs(inputs: dict[str, torch.Tensor], out: Any) -> dict[str, Any]:
    """Returns what a model that generates is given after a first token."""
    token = inputs["input_ids"][:, :1]
    given: dict[str, Any] = {"past_key_values": out.past_key_values}
    mask = inputs.get("attention_mask")
    if "decoder_input_ids" in inputs:
        kept = {} if mask is None else {"attention_mask": mask}
        return given | kept | {"decoder_input_ids": token, "encoder_outputs": (out.encoder_last_hidden_state,)}
    longer = {} if mask is None else {"attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1)}
    return given | longer | {"input_ids": token}
