"""Relative positions for models of transformers that were trained with absolute ones.

>>> from transformers import BertConfig, BertModel
>>> config = BertConfig(
...     vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=16
... )
>>> model = convert(BertModel(config), "t5")
>>> model(torch.ones(1, 40, dtype=torch.int64)).last_hidden_state.shape
torch.Size([1, 40, 8])
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, TrainerCallback, initialization
from transformers.models.bert.modeling_bert import BertEmbeddings, BertPreTrainedModel, BertSelfAttention
from transformers.models.distilbert.modeling_distilbert import DistilBertPreTrainedModel, DistilBertSelfAttention
from transformers.models.distilbert.modeling_distilbert import Embeddings as DistilBertEmbeddings
from transformers.models.electra.modeling_electra import ElectraEmbeddings, ElectraPreTrainedModel, ElectraSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2Model, GPT2PreTrainedModel
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings, RobertaPreTrainedModel, RobertaSelfAttention

from lagwise import noise
from lagwise.encodings import ENCODINGS, Encoding, canonical_name, make, options_of
from lagwise.feature_maps import FEATURE_MAPS, Favor, FeatureMap
from lagwise.hf.bert import TYPES, RelativeBertAttention, UnusedEmbedding, relative_class
from lagwise.hf.interface import require_no_dropout
from lagwise.hf.masks import NAME
from lagwise.nn.relative import check_encoding, content_width, own_map
from lagwise.noise import Stream
from lagwise.terms import Terms


class Family(NamedTuple):
    """The classes of one kind of model, and where its absolute positions are."""

    name: str
    model: type[PreTrainedModel]
    attention: type[nn.Module]
    embeddings: type[nn.Module]
    positions: str = "position_embeddings"
    inputs: tuple[str, ...] = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")


FAMILIES = (
    Family("BERT", BertPreTrainedModel, BertSelfAttention, BertEmbeddings),
    Family("RoBERTa", RobertaPreTrainedModel, RobertaSelfAttention, RobertaEmbeddings),
    Family(
        "DistilBERT", DistilBertPreTrainedModel, DistilBertSelfAttention, DistilBertEmbeddings,
        inputs=("input_ids", "inputs_embeds", "position_ids"),
    ),
    Family("ELECTRA", ElectraPreTrainedModel, ElectraSelfAttention, ElectraEmbeddings),
    Family("GPT-2", GPT2PreTrainedModel, GPT2Attention, GPT2Model, positions="wpe", inputs=("input_ids", "past_key_values")),
)  # fmt: skip

POSITIONS = ("position_embeddings", "embed_positions", "wpe")
"""What models call their tables of absolute positions."""

FROM_THE_MODEL = ("heads", "head_dim", "causal")
"""Options of encodings that the model decides."""


def convert(
    model: Any,
    encoding: str,
    *,
    absolute: Literal["remove", "keep", "fade"] = "remove",
    attention: Literal["softmax", "linear"] = "softmax",
    feature_map: str | None = None,
    per_layer: bool = True,
    neutral: bool = True,
    **options: Any,
) -> Any:
    """Gives a model relative positions, in place, and returns it.

    BERT, RoBERTa, DistilBERT, ELECTRA and GPT-2, bare and with every head. Each self-attention gets a `lagwise_encoding`, and the
    config an entry `lagwise`, with which `from_pretrained` builds the same model wherever `lagwise.hf` is imported. A model that
    was converted before loses its first encoding.

    Args:
        model: A model of transformers.
        encoding: The name of a relative encoding, see `lagwise.ENCODINGS`.
        absolute: What becomes of the absolute positions: "remove" (they add nothing, and inputs may be of any length), "keep", or
            "fade": they are multiplied by a factor that is 1 until `fade` sets another.
        attention: "softmax", or "linear" in encoders, which then drop no attention weights.
        feature_map: Of linear attention: "favor" (unless given), "relu" or "elu", one for each layer.
        per_layer: Have an encoding for each layer, or one for all of them.
        neutral: Start where the encoding changes nothing, if there is such a place, or with the encoding's own first values.
        options: Options of the encoding; the number and width of heads, and whether it is causal, come from the model.
    """
    # A config holds the one name that every version knows.
    name = canonical_name(encoding) if isinstance(encoding, str) else encoding
    entry = dict(
        encoding=name, absolute=absolute, attention=attention, feature_map=feature_map, per_layer=per_layer, neutral=neutral,
        options=options,
    )  # fmt: skip
    check_model(model)
    check_entry(entry)
    build(model, entry)
    model.config.lagwise = entry
    model.set_attn_implementation(NAME)
    return model


def fade(model: nn.Module, factor: float) -> None:
    """Multiplies the absolute positions of a model that was converted with `absolute="fade"` by a factor from 1 down to 0."""
    if not 0.0 <= factor <= 1.0:
        raise ValueError(f"factor must be between 0 and 1, but is {factor}")
    found = [module for module in model.modules() if isinstance(module, FadedEmbedding)]
    if not found:
        raise ValueError("model must have positions that fade, but has none: convert it with absolute='fade'")
    for module in found:
        module.lagwise_factor.fill_(factor)


class FadeCallback(TrainerCallback):
    """Fades absolute positions from 1 at the first step of a training to 0 after some steps, for transformers' Trainer.

    Args:
        steps: The number of steps of the optimizer after which nothing is left of them.
    """

    def __init__(self, steps: int):
        if steps < 1:
            raise ValueError(f"steps must be at least 1, but is {steps}")
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        fade(options["model"], max(0.0, 1.0 - state.global_step / self.steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
        # Before the evaluation and the checkpoint that follow a step.
        self.on_train_begin(args, state, control, **options)


def redraw(model: nn.Module) -> None:
    """Draws another projection for each "favor" map of a model with linear attention, from the default generator."""
    found = [module for module in model.modules() if isinstance(module, Favor)]
    if not found:
        raise ValueError("model must have feature maps 'favor', but has none: convert it with attention='linear'")
    for module in found:
        module.redraw()


class ConvertedAttention(RelativeBertAttention):
    """Makes its terms from its own `lagwise_encoding`, or from that of the layer that holds it for all."""

    lagwise_encoding: Encoding
    lagwise_feature_map: FeatureMap
    lagwise_holder: "tuple[ConvertedAttention, ...]"
    """The first layer, where it holds the encoding; a tuple, so that it is no submodule."""
    lagwise_layer: int

    @property
    def _encoding(self) -> Encoding:
        return (self.lagwise_holder[0] if self.lagwise_holder else self).lagwise_encoding

    @property
    def lagwise_random(self) -> bool:
        return self._encoding.random

    def lagwise_terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        """Returns the terms, those of linear attention if there is a feature map."""
        encoding = self._encoding
        if seed is not None and encoding.random and not self.lagwise_holder:
            # In evaluation the seed is the same in all layers, and their encodings draw different numbers all the same.
            seed = noise.bits(seed, Stream.LAYER, self.lagwise_layer)
        terms = encoding.linear_terms if hasattr(self, "lagwise_feature_map") else encoding.terms
        return terms(first, last, scale=scale, seed=seed)


class KeptEmbedding(nn.Embedding):
    """Absolute positions that are added beside relative ones."""


class FadedEmbedding(nn.Embedding):
    """Absolute positions that are multiplied by a factor."""

    lagwise_factor: Tensor

    def forward(self, input: Tensor) -> Tensor:
        # Positions beyond the table come here only when the factor is 0.
        return self.lagwise_factor * super().forward(input.clamp(max=self.num_embeddings - 1))


EMBEDDINGS = {"remove": UnusedEmbedding, "keep": KeptEmbedding, "fade": FadedEmbedding}
"""What the table of absolute positions becomes."""


def install() -> None:
    """Lets models whose config tells of a conversion be built and initialised with it."""
    for family in FAMILIES:
        if not hasattr(family.model.post_init, "__wrapped__"):
            family.model.post_init = with_positions(family.model.post_init)
            family.model._init_weights = with_first_values(family.model._init_weights)


def with_positions(post_init: Callable) -> Callable:
    """Wraps the method that ends the construction of a model, before weights are loaded."""

    @wraps(post_init)
    def wrapped(self: PreTrainedModel) -> None:
        entry = getattr(self.config, "lagwise", None)
        # The model inside a model with a head comes first.
        if entry is not None and not all(isinstance(layer, ConvertedAttention) for layer in layers_of(self)):
            asked = self.config._attn_implementation
            if asked not in (NAME, self.get_correct_attn_implementation(None)):
                raise ValueError(
                    f"attn_implementation must be 'lagwise' in a model with relative positions, but is {asked!r}, which would "
                    "leave them out: leave it out"
                )
            check_entry(entry)
            build(self, entry)
            self.config._attn_implementation = NAME
        post_init(self)

    return wrapped


def with_first_values(init_weights: Callable) -> Callable:
    """Wraps the method that gives a module its first values, and those that a checkpoint does not have."""

    @wraps(init_weights)
    def wrapped(self: PreTrainedModel, module: nn.Module) -> None:
        init_weights(self, module)
        if isinstance(module, ConvertedAttention):
            # Loading leaves empty memory in what is not in the checkpoint, and marks what is.
            for made, parts in zip(new_parts(self.config, self.config.lagwise), own_parts(module), strict=True):
                if parts is not None and made is not None:
                    for first, own in zip(tensors_of(made), tensors_of(parts), strict=True):
                        initialization.copy_(own, first)
        elif isinstance(module, FadedEmbedding):
            initialization.ones_(module.lagwise_factor)
        elif isinstance(module, UnusedEmbedding):
            # Replicas of a model wait for gradients of all weights that ask for one.
            module.weight.requires_grad_(False)

    return wrapped


def build(model: PreTrainedModel, entry: dict[str, Any]) -> None:
    """Gives each self-attention what the entry says, and the absolute positions a new class."""
    layers = list(layers_of(model))
    if entry["attention"] == "linear":
        check_linear(model, layers)
    made = [new_parts(model.config, entry) for _ in layers]
    for number, (layer, (encoding, feature_map)) in enumerate(zip(layers, made, strict=True)):
        strip(layer)
        shared = not entry["per_layer"] and number > 0
        layer.lagwise_layer, layer.lagwise_holder = number, (layers[0],) if shared else ()
        place: dict[str, Any] = dict(device=next(layer.parameters()).device, dtype=model.dtype)
        if not shared:
            layer.lagwise_encoding = encoding.to(**place).train(layer.training)
        if feature_map is not None:
            layer.lagwise_feature_map = feature_map.to(**place).train(layer.training)
        layer.__class__ = relative_class(ConvertedAttention, type(layer))
    for module in model.modules():
        family = next((family for family in FAMILIES if isinstance(module, family.embeddings)), None)
        if family is not None:
            place_absolute(module, getattr(module, family.positions), EMBEDDINGS[entry["absolute"]])


def new_parts(config: PreTrainedConfig, entry: dict[str, Any]) -> tuple[Encoding, FeatureMap | None]:
    """Makes the encoding and the feature map of a layer, with their first values, on the CPU."""
    name, heads = entry["encoding"], config.num_attention_heads
    causal = {"causal": True} if is_causal(config) and name in ENCODINGS and "causal" in options_of(name) else {}
    sizes = dict(heads=heads, head_dim=config.hidden_size // heads)
    # A model that is loaded is built on the meta device, where nothing can be computed.
    with torch.device("cpu"):
        encoding = make(name, **sizes, **causal, **entry["options"])
        check_encoding(encoding, entry["attention"])
        if entry["neutral"]:
            encoding.make_neutral()
        if entry["attention"] == "softmax":
            return encoding, None
        return encoding, own_map(entry["feature_map"] or "favor", content_width(encoding, **sizes))


def own_parts(layer: ConvertedAttention) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns the encoding and the feature map that a layer holds."""
    return getattr(layer, "lagwise_encoding", None), getattr(layer, "lagwise_feature_map", None)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Returns all parameters and buffers of a module."""
    return [*module.parameters(), *module.buffers()]


def strip(layer: Any) -> None:
    """Takes away what an earlier conversion gave to a layer."""
    if isinstance(layer, ConvertedAttention):
        for name in ("lagwise_encoding", "lagwise_feature_map"):
            if hasattr(layer, name):
                delattr(layer, name)
        layer.__class__ = type(layer).__bases__[1]


def place_absolute(module: nn.Module, table: Any, kind: type[nn.Embedding]) -> None:
    """Lets a table of absolute positions be added, fade or add nothing, whatever it did before."""
    if type(table) not in EMBEDDINGS.values():
        module.register_forward_pre_hook(at_any_length, with_kwargs=True)
    if isinstance(table, UnusedEmbedding):
        table.weight.requires_grad_(True)
    if isinstance(table, FadedEmbedding):
        del table.lagwise_factor
    table.__class__ = kind  # pyright: ignore[reportAttributeAccessIssue]
    if kind is FadedEmbedding:
        table.register_buffer("lagwise_factor", torch.ones((), device=table.weight.device, dtype=table.weight.dtype))
    if kind is UnusedEmbedding:
        table.weight.requires_grad_(False)


def at_any_length(module: Any, inputs: tuple, options: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Gives embeddings of absolute positions that add nothing what lets them take any length; raises for others that end.

    The models slice and count positions up to the end of their table before they look into it.
    """
    family = next(family for family in FAMILIES if isinstance(module, family.embeddings))
    table = getattr(module, family.positions)
    named = {**dict(zip(family.inputs, inputs, strict=False)), **options}
    if not isinstance(table, UnusedEmbedding):
        length = length_of(named, table)
        if length <= longest(table):
            return inputs, options
        if not isinstance(table, FadedEmbedding) or float(table.lagwise_factor) > 0.0:
            raise ValueError(
                f"the input must have at most {longest(table)} tokens, where the absolute positions of the model end, but has "
                f"{length}: truncate or split it, or convert the model with absolute='remove'"
                + (", or fade them to 0" if isinstance(table, FadedEmbedding) else "")
            )
    # GPT-2 looks positions up as they are, and makes its mask of them.
    if isinstance(module, GPT2Model):
        return inputs, options
    tokens = tokens_of(named)
    named["position_ids"] = tokens.new_zeros(1, tokens.shape[1], dtype=torch.int64)
    if "token_type_ids" in family.inputs and named.get("token_type_ids") is None:
        named["token_type_ids"] = tokens.new_zeros(tokens.shape[:2], dtype=torch.int64)
    return (), named


def longest(table: nn.Embedding) -> int:
    """Returns how many tokens a table has positions for; RoBERTa's start behind that of padding."""
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def last_position(model: Any) -> int:
    """Returns how many tokens a Hugging Face model has positions for; without bound where it adds none to its input."""
    if getattr(model.config, "position_embedding_type", None) in TYPES:
        return model.config.max_position_embeddings
    named = (module for name, module in model.named_modules() if name.rsplit(".", 1)[-1] in POSITIONS)
    tables = [table for table in named if isinstance(table, nn.Embedding) and not isinstance(table, UnusedEmbedding)]
    # Some tables have places before the first position, of which the config tells.
    return min([model.config.max_position_embeddings, *map(longest, tables)]) if tables else sys.maxsize


def tokens_of(named: dict[str, Any]) -> Tensor:
    """Returns the tokens of an input, or their vectors."""
    tokens = named.get("input_ids")
    return named["inputs_embeds"] if tokens is None else tokens


def length_of(named: dict[str, Any], table: nn.Embedding) -> int:
    """Returns how many positions an input needs, and looks at values only where it has more tokens than positions."""
    tokens, positions, cache = tokens_of(named), named.get("position_ids"), named.get("past_key_values")
    past = named.get("past_key_values_length", 0) if cache is None else cache.get_seq_length()
    # The number of tokens in a static cache is a tensor, which a compiled graph cannot read.
    length = tokens.shape[1] + (0 if isinstance(past, Tensor) and torch.compiler.is_compiling() else int(past))
    if length <= longest(table):
        return length
    if positions is not None:
        return int(positions.max()) + 1 - (table.num_embeddings - longest(table))
    if table.padding_idx is not None and not tokens.is_floating_point():
        return length - tokens.shape[1] + int(tokens.ne(table.padding_idx).sum(1).max())
    return length


def layers_of(model: nn.Module) -> Iterator[Any]:
    """Yields each self-attention of a model."""
    kinds = tuple(family.attention for family in FAMILIES)
    for module in model.modules():
        if isinstance(module, kinds) and not getattr(module, "is_cross_attention", False):
            yield module


def is_causal(config: PreTrainedConfig) -> bool:
    """Says whether a model lets tokens see no later one."""
    return config.model_type == "gpt2" or bool(getattr(config, "is_decoder", False))


def check_model(model: Any) -> None:
    """Raises for a model of another family, and for one that has relative positions already."""
    if not isinstance(model, tuple(family.model for family in FAMILIES)):
        raise ValueError(
            f"model must be one of {', '.join(family.name for family in FAMILIES)}, with any head, but is {type(model).__name__}"
        )
    kind = getattr(model.config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ValueError(
            f"model must have absolute positions, but its position_embedding_type is {kind!r}: load it with "
            "lagwise.hf.from_pretrained_relative"
        )


def check_entry(entry: dict[str, Any]) -> None:
    """Raises for a conversion that there is not."""
    name, options = entry["encoding"], entry["options"]
    if not isinstance(name, str):
        raise ValueError(
            f"encoding must be the name of an encoding, which the config can tell, but is {type(name).__name__}: give its name, "
            "and its options as keywords"
        )
    if name in ENCODINGS and ENCODINGS[name].absolute:
        relative = [name for name, kind in ENCODINGS.items() if not kind.absolute]
        raise ValueError(f"encoding must be relative, one of {', '.join(relative)}, but {name!r} is absolute")
    if entry["absolute"] not in EMBEDDINGS:
        raise ValueError(f"absolute must be one of {', '.join(EMBEDDINGS)}, but is {entry['absolute']!r}")
    if entry["per_layer"] not in (True, False):
        raise ValueError(
            f"per_layer must be True or False, but is {entry['per_layer']!r}: 'gate' is an option of lagwise.nn.Encoder"
        )
    given = [option for option in FROM_THE_MODEL if option in options]
    if given:
        raise ValueError(f"options must not have {', '.join(given)}, which the model decides: leave them out")
    if entry["feature_map"] is not None and entry["attention"] == "softmax":
        raise ValueError("feature_map belongs to linear attention, but attention is 'softmax': pass attention='linear'")
    if entry["feature_map"] not in (None, *FEATURE_MAPS):
        raise ValueError(f"feature_map must be the name of one, {', '.join(FEATURE_MAPS)}, but is {entry['feature_map']!r}")
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(
            f"options must be numbers, words and lists of them, which a config can hold, but are {options}"
        ) from error


def check_linear(model: PreTrainedModel, layers: list[Any]) -> None:
    """Raises for a model whose attention cannot be linear."""
    if is_causal(model.config):
        raise ValueError(
            f"attention must be 'softmax' in a causal model, whose cache holds keys, but is 'linear' for {type(model).__name__}: "
            "build a lagwise.nn.Decoder"
        )
    require_no_dropout(max(layer.dropout.p for layer in layers))
