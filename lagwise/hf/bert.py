"""The relative positions of old BERT checkpoints, which transformers 5 loads and then leaves out.

    logit(i, j) = (q_i . k_j + q_i . a) / sqrt(head_dim)                 relative_key            a = distance_embedding[i - j]
    logit(i, j) = (q_i . k_j + q_i . a + k_j . a) / sqrt(head_dim)       relative_key_query

Up to transformers 4.57 they were asked for by `position_embedding_type` in the config: Shaw's keys, and method 4 of Huang, Liang,
Xu, Xiang (2020). Absolute positions were then in the checkpoint, but not added.

>>> from transformers import BertConfig, BertModel
>>> config = BertConfig(
...     vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, max_position_embeddings=16,
...     position_embedding_type="relative_key_query",
... )
>>> model = restore_relative(BertModel(config), {"encoder.layer.0.attention.self.distance_embedding.weight": torch.randn(31, 4)})
>>> model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
torch.Size([1, 3, 8])
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from os import PathLike
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from lagwise.hf.masks import NAME
from lagwise.lags import LagTable
from lagwise.terms import Terms

TYPES = ("relative_key", "relative_key_query")
"""The relative values of `position_embedding_type`."""

FAMILIES = (
    "bert", "camembert", "data2vec-text", "electra", "ernie", "roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta",
    "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""The `model_type` of the models that compute relative positions in BERT's way."""

TABLE = "distance_embedding.weight"

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Options that say where a checkpoint is found."""


def from_pretrained_relative(path_or_name: str | PathLike[str], model_class: type | None = None, **options: Any) -> Any:
    """Loads a checkpoint of BERT's family with relative positions, and computes what transformers 4.57 computed.

        model = from_pretrained_relative("zhiheng-huang/bert-base-uncased-embedding-relative-key-query")

    All weights have their old names: `save_pretrained` writes what this function and transformers 4 load. Inputs longer than
    `max_position_embeddings` raise, as they did there. One thing differs: in a decoder with a cache, transformers 4 took all
    tokens of a call for the last one; here each has its place, with a cache as without.

    Args:
        path_or_name: A folder, or a name on the Hub.
        model_class: A class of transformers, such as `BertForMaskedLM` or `AutoModelForMaskedLM`; the one that the checkpoint
            names unless given.
        options: Options of the class's `from_pretrained`.
    """
    if options.setdefault("attn_implementation", NAME) != NAME:
        raise ValueError(
            f"attn_implementation must be 'lagwise', but is {options['attn_implementation']!r}: no other computes relative "
            "positions in BERT. Leave it out"
        )
    config = options.get("config")
    if not isinstance(config, PreTrainedConfig):
        where = {name: value for name, value in options.items() if name in HUB_OPTIONS}
        config = AutoConfig.from_pretrained(path_or_name if config is None else config, **where)
    check_config(config)
    plain = plain_class(config, model_class)
    wants_report = options.pop("output_loading_info", False)
    # The tables must be there before weights are loaded. Afterwards the model is one of the plain class, whose name it saves.
    loader: Any = type(plain.__name__, (plain,), {"__init__": build_relative, "__module__": plain.__module__})
    model, report = loader.from_pretrained(path_or_name, output_loading_info=True, **options)
    model.__class__ = plain
    lost = sorted(name for name in report["missing_keys"] if name.endswith(TABLE))
    if lost:
        raise ValueError(
            f"path_or_name must be a checkpoint with relative positions, but {path_or_name} has no {lost[0]}: was it saved by "
            "transformers 5, which drops them? Take the original checkpoint"
        )
    return (model, report) if wants_report else model


def restore_relative(model: PreTrainedModel, source: Mapping[str, Tensor] | str | PathLike[str]) -> PreTrainedModel:
    """Gives a loaded model of BERT's family the relative positions of its checkpoint, in place, and returns it.

    Args:
        model: A model whose config asks for relative positions, as transformers 5 loads it.
        source: The state dict of the checkpoint, or the folder or name that it was loaded from.
    """
    check_config(model.config)
    weights = source if isinstance(source, Mapping) else from_pretrained_relative(source, type(model)).state_dict()
    tables = {}
    for name, module in self_attentions(model):
        # A model with a head has a prefix that the checkpoint of one without does not have, and the other way round.
        prefix = f"{model.base_model_prefix}."
        names = [f"{name}.{TABLE}", f"{prefix}{name}.{TABLE}", f"{name}.{TABLE}".removeprefix(prefix)]
        table = next((weights[each] for each in names if each in weights), None)
        if table is None:
            raise ValueError(
                f"source must have relative positions, but has no {names[0]}: give the state dict of the original checkpoint, or "
                "its path"
            )
        shape = (2 * model.config.max_position_embeddings - 1, module.attention_head_size)
        if table.shape != shape:
            raise ValueError(
                f"{names[0]} must have shape {shape}, [2 max_position_embeddings - 1, head_dim] of the model's config, but has "
                f"shape {tuple(table.shape)}: is the checkpoint that of another model?"
            )
        tables[name] = table
    add_tables(model)
    with torch.no_grad():
        for name, module in self_attentions(model):
            module.distance_embedding.weight.copy_(tables[name])
    model.set_attn_implementation(NAME)
    return model


class RelativeBertAttention(nn.Module, ABC):
    """What an attention of transformers becomes: it makes terms, and computes with this library or not at all."""

    config: PreTrainedConfig

    @property
    def lagwise_random(self) -> bool:
        """Whether terms are made from random numbers."""
        return False

    @abstractmethod
    def lagwise_terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        """Returns the terms for a call that can reach the lags from `first` to `last`."""

    def forward(self, *inputs, **options) -> Any:
        name = self.config._attn_implementation
        if name != NAME:
            raise ValueError(
                f"attn_implementation must be 'lagwise' in a model with relative positions, but is {name!r}, which would leave "
                "them out: call model.set_attn_implementation('lagwise')"
            )
        return super().forward(*inputs, **options)

    def __reduce__(self):
        # The class is made on demand, so that pickle does not find it by its name.
        return new_relative, type(self).__bases__, self.__dict__


class DistanceAttention(RelativeBertAttention):
    """Makes its terms from its `distance_embedding`. Cross-attention has no table, and no relative positions."""

    distance_embedding: nn.Embedding

    def lagwise_terms(self, first: int, last: int, *, scale: float, seed: Tensor | None = None) -> Terms:
        """Returns the terms; the table covers all lags of a sequence that the model takes."""
        if not hasattr(self, "distance_embedding"):
            return Terms()
        # BERT's rows are distances into the past.
        values = self.distance_embedding.weight.flip(0)[None]
        table = LagTable(values, -(values.shape[1] // 2))
        return Terms(query=table, key=table if self.config.position_embedding_type == "relative_key_query" else None)


class UnusedEmbedding(nn.Embedding):
    """The absolute positions of a model with relative ones: they are kept, and saved again, but add nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.new_zeros(1).expand(*input.shape, self.embedding_dim)


@cache
def relative_class(relative: type[RelativeBertAttention], kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the class of a kind of attention with a kind of relative positions."""
    return type(f"Relative{kind.__name__}", (relative, kind), {"__module__": __name__})


def new_relative(relative: type[RelativeBertAttention], kind: type[nn.Module]) -> nn.Module:
    """Returns an empty attention with relative positions, for copies and pickles to fill."""
    made = relative_class(relative, kind)
    return made.__new__(made)


def build_relative(self: PreTrainedModel, config: PreTrainedConfig, *inputs, **options) -> None:
    """Builds a model as its class does, and adds the tables."""
    super(type(self), self).__init__(config, *inputs, **options)
    add_tables(self)


def add_tables(model: PreTrainedModel) -> None:
    """Adds a table to each self-attention, and leaves absolute positions out."""
    for _, module in self_attentions(model):
        if not isinstance(module, RelativeBertAttention):
            lags, device = 2 * model.config.max_position_embeddings - 1, module.query.weight.device
            module.distance_embedding = nn.Embedding(lags, module.attention_head_size, device=device, dtype=model.dtype)
            module.__class__ = relative_class(DistanceAttention, type(module))
    for module in list(model.modules()):
        if type(module).__name__.endswith("CrossAttention") and not isinstance(module, RelativeBertAttention):
            module.__class__ = relative_class(DistanceAttention, type(module))
        absolute = getattr(module, "position_embeddings", None)
        if isinstance(absolute, nn.Embedding) and not isinstance(absolute, UnusedEmbedding):
            absolute.__class__ = UnusedEmbedding
            module.register_forward_pre_hook(refuse_longer, with_kwargs=True)


def refuse_longer(module: Any, inputs: tuple, options: dict) -> None:
    """Raises for an input that is longer than the tables."""
    given = next(x for x in (*inputs, options.get("input_ids"), options.get("inputs_embeds")) if x is not None)
    past = options.get("past_key_values_length", 0)
    # The number of tokens in a static cache is a tensor, which would have to be waited for.
    length, longest = given.shape[1] + (past if isinstance(past, int) else 0), module.position_embeddings.num_embeddings
    if length > longest:
        raise ValueError(
            f"the input must have at most {longest} tokens, the max_position_embeddings of the checkpoint, but has {length}: "
            "its distances end there. Truncate or split the input"
        )


def self_attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields each self-attention of a model with its name; cross-attention had no relative positions."""
    for name, module in model.named_modules():
        if type(module).__name__.endswith("SelfAttention"):
            yield name, module


def check_config(config: PreTrainedConfig) -> None:
    """Raises for a model without relative positions, or of another family."""
    if config.model_type not in FAMILIES:
        raise ValueError(f"the model must be one of {', '.join(FAMILIES)}, but its model_type is {config.model_type!r}")
    kind = getattr(config, "position_embedding_type", "absolute")
    if kind not in TYPES:
        raise ValueError(
            f"the config's position_embedding_type must be 'relative_key' or 'relative_key_query', but is {kind!r}: load this "
            "model with from_pretrained"
        )


def plain_class(config: PreTrainedConfig, model_class: type | None) -> type[PreTrainedModel]:
    """Returns the class to load: the given one, the one that an auto class finds, or the one that the config names."""
    if model_class is None:
        name = (config.architectures or [None])[0]
        found = getattr(transformers, name or "", None)
        if found is None:
            raise ValueError(
                f"model_class must be given, because the checkpoint's config names {name!r}, which is not in transformers"
            )
        return found
    if issubclass(model_class, PreTrainedModel):
        return model_class
    if not hasattr(model_class, "from_config"):
        raise ValueError(f"model_class must be a model or an auto class of transformers, but is {model_class.__name__}")
    with torch.device("meta"):
        return type(model_class.from_config(config))
