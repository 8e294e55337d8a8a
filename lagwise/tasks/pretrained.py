"""Encoders of Hugging Face in tasks: loaded with the dropout of a config, and converted to its encoding."""

from typing import Any, Literal

from lagwise.train.config import Config

Absolute = Literal["remove", "keep", "fade"]
"""What becomes of a model's absolute positions."""


DROPOUTS = {
    "dropout": ("hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop"),
    "attention_dropout": ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"),
}
"""What the models of Hugging Face call our two kinds of dropout."""


def with_dropout(path: str, config: Config) -> Any:
    """Loads a model with the dropout of a config."""
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    try:
        own = AutoConfig.from_pretrained(path)
        for field, names in DROPOUTS.items():
            for name in names:
                if hasattr(own, name):
                    setattr(own, name, getattr(config, field))
        return AutoModelForQuestionAnswering.from_pretrained(path, config=own)
    except OSError as error:
        raise ValueError(f"path must be the folder or the name of a Hugging Face model, but is {path!r}: {error}") from error


def converted(model: Any, config: Config, absolute: Absolute) -> Any:
    """Returns a model with the encoding of a config; without one, and with absolute positions, as it is."""
    if config.encoding == "none" and absolute == "keep" and config.attention == "softmax":
        return model
    from lagwise.hf import convert

    linear = config.attention == "linear"
    return convert(
        model, config.encoding, absolute=absolute, attention=config.attention, per_layer=bool(config.per_layer),
        feature_map=config.feature_map if linear else None, **config.encoding_options,
    )  # fmt: skip
