"""Encoders of Hugging Face in tasks: loaded with the dropout of a config, and converted to its encoding."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from lagwise.errors import require_sizes
from lagwise.lab.config import Config
from lagwise.lab.tasks.base import Batch
from lagwise.lab.tasks.models import sides_of

Absolute = Literal["remove", "keep", "fade"]
"""What becomes of a model's absolute positions."""

DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
}
"""What the models of Hugging Face call our two kinds of dropout."""


class PretrainedOptions(Protocol):
    """What tasks let choose of an encoder of Hugging Face."""

    @property
    def model(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def absolute(self) -> Absolute: ...

    @property
    def fade(self) -> int: ...


def check_pretrained(options: PretrainedOptions) -> None:
    """Raises for options of a task that do not fit a model of Hugging Face, or are for one where there is none."""
    model, path, absolute, fade = options.model, options.path, options.absolute, options.fade
    if absolute not in get_args(Absolute):
        raise ValueError(f"absolute must be one of {', '.join(get_args(Absolute))}, but is {absolute!r}")
    if bool(path) != (model == "hf"):
        needed = "the folder or name of a model with model='hf', and left out without"
        raise ValueError(f"path must be {needed}, but is {path!r} with model={model!r}")
    if (fade > 0) != (absolute == "fade"):
        needed = "a number of steps with absolute='fade', and 0 without"
        raise ValueError(f"fade must be {needed}, but is {fade} with absolute={absolute!r}")


@dataclass(frozen=True)
class EncoderOptions:
    """What can be chosen of tasks that an encoder reads texts for.

    Args:
        model: "encoder" (a stack of this library), or "hf" (a Hugging Face encoder that is converted to the encoding).
        path: Folder or name of the Hugging Face model.
        absolute: What becomes of its absolute positions. The encoding "learned" leaves the model as it is in any case, and so
            does "none" with "keep".
        fade: With absolute="fade", the training steps after which nothing is left of them.
        tokenizer: Folder, file or name of a tokenizer. Unless given, that of the Hugging Face model, or WordPiece that is trained
            on the training text.
        vocabulary: Number of tokens of a tokenizer that is trained.
    """

    models: ClassVar[tuple[str, ...]] = ("encoder", "hf")
    model: str = "encoder"
    path: str = ""
    absolute: Absolute = "remove"
    fade: int = 0
    tokenizer: str = ""
    vocabulary: int = 8000

    def __post_init__(self) -> None:
        require_sizes(vocabulary=self.vocabulary)
        if self.model not in self.models:
            raise ValueError(f"model must be one of {', '.join(self.models)}, but is {self.model!r}")
        check_pretrained(self)


class Pretrained(nn.Module):
    """An encoder of Hugging Face with a head, converted to the encoding of a config.

    Its sizes are its own; dropout, the encoding with its options, and the kind of attention are the config's.

    Args:
        config: What to convert to.
        options: Of the task: which model it is, and what becomes of its absolute positions.
        symbols: Number of tokens of the tokenizer.
        fields: Of the model's own config.
    """

    head: ClassVar[str]
    """The name of a class of transformers that loads it, such as "AutoModelForQuestionAnswering"."""
    steps: Tensor

    def __init__(self, config: Config, options: PretrainedOptions, *, symbols: int, **fields: Any):
        super().__init__()
        if config.per_layer == "gate":
            raise ValueError("per_layer must be true or false with model='hf', but is 'gate'")
        self.inner = convert_encoder(load_encoder(options.path, config, self.head, fields), config, options.absolute)
        if symbols > self.inner.config.vocab_size:
            raise ValueError(
                f"tokenizer must be the model's, which has {self.inner.config.vocab_size:,} tokens, but it has {symbols:,}"
            )
        self.has_sides = getattr(self.inner.config, "type_vocab_size", 1) > 1
        self.absolute = options.absolute if config.encoding != "learned" else "keep"
        self.fade = options.fade
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def outputs(self, batch: Batch) -> Any:
        """Returns what the model says of a batch; one without lengths has rows that are full, of one side."""
        if self.fade and self.training:
            self.fade_positions()
        if "lengths" not in batch:
            return self.inner(input_ids=batch["tokens"])
        time = torch.arange(batch["tokens"].shape[1], device=batch["tokens"].device)
        sides = {"token_type_ids": sides_of(batch)} if self.has_sides else {}
        return self.inner(input_ids=batch["tokens"], attention_mask=(time < batch["lengths"][:, None]).long(), **sides)

    def fade_positions(self) -> None:
        """Takes a little more of the absolute positions away, from all of them at the first step."""
        from lagwise.hf import fade

        fade(self.inner, max(0.0, 1.0 - int(self.steps) / self.fade))
        self.steps += 1

    def shared_names(self) -> list[str]:
        """Returns the names of what models with different heads have in common; a pooler is part of a head."""
        body = f"inner.{self.inner.base_model_prefix}."
        return [name for name in self.state_dict() if name.startswith(body) and ".pooler." not in name]

    def check_start(self, config: Config) -> None:
        """Raises for a run that did without the absolute positions that this model would add again."""
        before = config.task_options.get("absolute", "remove")
        if self.absolute != "remove" and before != "keep" and config.encoding != "learned":
            raise ValueError(
                f"absolute must be 'remove' to start from a run with absolute={before!r}, which does without absolute positions, "
                f"but is {self.absolute!r}"
            )


def load_encoder(path: str, config: Config, head: str, fields: dict[str, Any]) -> Any:
    """Loads a model with the dropout of a config."""
    import transformers

    try:
        own = transformers.AutoConfig.from_pretrained(path, **fields)
        for field, names in DROPOUTS.items():
            for name in names:
                if hasattr(own, name):
                    setattr(own, name, getattr(config, field))
        # Weights that are stored in half precision are trained in full: the precision of a run says what is computed in less.
        return getattr(transformers, head).from_pretrained(path, config=own, dtype=torch.float32)
    except OSError as error:
        raise ValueError(f"path must be the folder or the name of a Hugging Face model, but is {path!r}: {error}") from error


def convert_encoder(model: Any, config: Config, absolute: Absolute) -> Any:
    """Returns a model with the encoding of a config; "learned" are its own absolute positions, which stay as they are.

    So do they with the encoding "none" and absolute="keep".
    """
    if config.encoding == "learned":
        config, absolute = own_positions(model, config, absolute), "keep"
    if config.encoding == "none" and absolute == "keep" and config.attention == "softmax":
        return model
    from lagwise.hf import convert

    linear = config.attention == "linear"
    return convert(
        model, config.encoding, absolute=absolute, attention=config.attention, per_layer=bool(config.per_layer),
        feature_map=config.feature_map if linear else None, **config.encoding_options,
    )  # fmt: skip


def own_positions(model: Any, config: Config, absolute: Absolute) -> Config:
    """Returns a config that leaves a model its own learned positions; raises where it has none or they end too early."""
    from lagwise.hf.conversion import check_model

    if absolute == "fade":
        raise ValueError("absolute must be 'remove' or 'keep' with the encoding 'learned', whose positions stay, but is 'fade'")
    check_model(model)
    there, wanted = model.config.max_position_embeddings, config.encoding_options.get("length", 0)
    if there < wanted:
        raise ValueError(f"length must be at most {there}, where the model's own positions end, but is {wanted}: choose less")
    return replace(config, encoding="none", encoding_options={})
