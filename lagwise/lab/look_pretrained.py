"""A look through the lens at a Hugging Face model, which reads a text."""

from pathlib import Path
from typing import Any

import torch

from lagwise.extras import install_command
from lagwise.lab.look import Look, check_text, linear_notes
from lagwise.lens import capture


def look_at_pretrained(name: str, text: str, most: int) -> Look:
    """Lets a Hugging Face model read a text; the decoder of a model that has two stacks reads it too."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"a Hugging Face model needs transformers: {install_command('hf')}") from error
    from lagwise.hf.conversion import last_position

    check_text(text)
    if most < 1:
        raise ValueError(f"--tokens must be at least 1, but is {most}")
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise ValueError(f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} has no config.json")
    try:
        model = load_pretrained(name)
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise ValueError(
            f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} cannot be loaded: {error}"
        ) from error
    # Without files transformers makes a tokenizer that knows no word, and says nothing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ValueError(f"MODEL_OR_RUN must be a run, or a model with its tokenizer, but {name} has none: save it there too")
    ids = tokenizer(text, verbose=False)["input_ids"]
    if not ids:
        raise ValueError(f"--text must have tokens of the model, but its tokenizer finds none in {text!r}")
    longest = min(most, tokenizer.model_max_length, last_position(model))
    notes = [f"The text has {len(ids):,} tokens, of which the model reads the first {longest:,}."] if len(ids) > longest else []
    row = torch.tensor([ids[:longest]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = row
        notes.append("The decoder reads the same text as the encoder.")
    with torch.no_grad(), capture(model) as calls:
        model(**inputs)
    notes += linear_notes(calls)
    return Look(Path(name).name, model, calls, tokenizer.convert_ids_to_tokens(ids[:longest]), notes)


def load_pretrained(name: str) -> Any:
    """Returns a Hugging Face model whose attention is ours, in evaluation mode."""
    from transformers import AutoConfig, AutoModel

    from lagwise.hf import NAME, from_pretrained_relative
    from lagwise.hf.bert import TYPES

    config = AutoConfig.from_pretrained(name)
    if getattr(config, "position_embedding_type", None) in TYPES:
        return from_pretrained_relative(name, AutoModel).eval()
    return AutoModel.from_pretrained(name, attn_implementation=NAME).eval()
