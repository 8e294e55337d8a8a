"""What a run is: one flat set of fields, from defaults, the task, a preset and the command line, in this order."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lagwise.errors import nearest, require_sizes

Value = Any


@dataclass(frozen=True)
class Config:
    """All that decides what a run computes. Two runs with equal configs compute the same.

    Args:
        task: Name of the task.
        encoding: Name of the position encoding.
        preset: Name of the task's preset that fields were taken from, if any.
        task_options: The task's own options.
        encoding_options: Options of the encoding for `lagwise.make`.
        dim: Width of the model.
        layers: Number of layers.
        heads: Number of heads.
        head_dim: Width of a head; `dim / heads` unless given.
        hidden: Width of the feed-forward layers; `4 dim` unless given.
        norm: Normalisation before each part of a layer ("pre") or after it ("post").
        activation: Of the feed-forward layers.
        dropout: Dropout of the layers' outputs.
        attention_dropout: Dropout of attention weights.
        attention: "softmax" or "linear".
        feature_map: Of linear attention.
        features: Random features of "favor"; as many as it has by itself unless given.
        per_layer: One encoding for each layer, but for absolute ones, which act on the input; "gate": one for all, with a gate
            for each.
        tied: All layers have the same weights.
        steps: Training steps.
        batch: Examples of a step, in all processes together.
        rate: The largest learning rate.
        encoding_rate: Factor of the learning rate for the encoding's parameters: tables of a few numbers have to move further.
        schedule: How the rate falls: "constant", "linear", "cosine", or "rsqrt" (inverse square root of the step).
        warmup: Steps in which the rate rises to its largest value.
        weight_decay: Of AdamW; not for biases, norms and encodings.
        beta1: Of AdamW.
        beta2: Of AdamW.
        clip: Largest norm of the gradient; 0 for none.
        redraw: Steps between draws of the random features of "favor"; 0 for never.
        examples: How many training examples are used; all unless given.
        evaluate_every: Steps between evaluations on the validation split; 0 for one at the end.
        evaluate_examples: How many examples of a split are evaluated; all unless given.
        evaluate_batch: Examples of an evaluation step; `batch` unless given.
        lengths: Other lengths at which the test split is evaluated in the end.
        start: Folder of a run whose embedding and encoder the model starts from, such as one of language modelling; a model of
            Hugging Face starts from one of the same. With `{encoding}`, `{seed}` and `*` it is another one for each encoding and
            seed: `runs/lm/{encoding}/*-seed{seed}`.
        seed: Where the random numbers of weights, order and dropout start.
        data_seed: Where those of generated data start; `seed` unless given.
        precision: "fp32", "bf16" or "fp16".
    """

    task: str
    encoding: str = "t5"
    preset: str = ""
    task_options: dict[str, Value] = field(default_factory=dict)
    encoding_options: dict[str, Value] = field(default_factory=dict)
    dim: int = 128
    layers: int = 2
    heads: int = 4
    head_dim: int | None = None
    hidden: int | None = None
    norm: Literal["pre", "post"] = "pre"
    activation: Literal["gelu", "relu"] = "gelu"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    attention: Literal["softmax", "linear"] = "softmax"
    feature_map: Literal["favor", "relu", "elu"] = "favor"
    features: int | None = None
    per_layer: bool | Literal["gate"] = False
    tied: bool = False
    steps: int = 1000
    batch: int = 32
    rate: float = 1e-3
    encoding_rate: float = 1.0
    schedule: Literal["constant", "linear", "cosine", "rsqrt"] = "cosine"
    warmup: int = 100
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    clip: float = 1.0
    redraw: int = 0
    examples: int | None = None
    evaluate_every: int = 0
    evaluate_examples: int | None = None
    evaluate_batch: int | None = None
    lengths: tuple[int, ...] = ()
    start: str = ""
    seed: int = 0
    data_seed: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"

    def __post_init__(self) -> None:
        require_sizes(**{name: getattr(self, name) for name in SIZES if getattr(self, name) is not None})
        require_sizes(**{f"lengths[{place}]": length for place, length in enumerate(self.lengths)})
        for name in AT_LEAST_ZERO:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, but is {getattr(self, name)}")
        for name in ("dropout", "attention_dropout"):
            if not getattr(self, name) < 1.0:
                raise ValueError(f"{name} must be below 1, but is {getattr(self, name)}")
        # As they come back from a file, where there are lists and no tuples.
        for name in ("task_options", "encoding_options"):
            object.__setattr__(self, name, json.loads(json.dumps(getattr(self, name))))

    def to_json(self) -> dict[str, Value]:
        """Returns the fields as JSON knows them."""
        return {**asdict(self), "lengths": list(self.lengths)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Value]) -> "Config":
        """Returns the config of stored fields; those that are not there have their defaults."""
        if "task" not in stored:
            raise ValueError("'task' must be among the fields of a run, but is not")
        return with_fields(cls(stored["task"]), stored)

    def fingerprint(self, *, without: Iterable[str] = ()) -> str:
        """Returns twelve digits that tell configs apart; `without` names fields that do not count."""
        counted = {name: value for name, value in self.to_json().items() if name not in set(without)}
        return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()[:12]


SIZES = ("dim", "layers", "heads", "head_dim", "hidden", "features", "batch", "examples", "evaluate_examples", "evaluate_batch")
"""Fields that are whole numbers of at least 1, where they are given."""

AT_LEAST_ZERO = (
    "dropout", "attention_dropout", "steps", "rate", "encoding_rate", "warmup", "weight_decay", "beta1", "beta2", "clip",
    "redraw", "evaluate_every",
)  # fmt: skip
"""Fields that are not negative."""

FIELDS = tuple(each.name for each in fields(Config))


def difference_words(there: Config, here: Config) -> str:
    """Returns in which fields two configs differ; "" for equal ones.

    >>> difference_words(Config("adding", seed=1), Config("adding", task_options={"length": 9}))
    'seed is 1 there and 0 here, task.length is not given there and 9 here'
    """
    stored, wanted = by_name(there), by_name(here)
    differing = [name for name in {**stored, **wanted} if stored.get(name, MISSING) != wanted.get(name, MISSING)]
    return ", ".join(f"{name} is {in_json(stored, name)} there and {in_json(wanted, name)} here" for name in differing)


MISSING = object()
"""Differs from every value, also from None."""


def by_name(config: Config) -> dict[str, Value]:
    """Returns the values of all fields by the names that the command line has for them."""
    plain = {name: value for name, value in config.to_json().items() if not name.endswith("_options")}
    encoding = {f"encoding.{name}": value for name, value in config.encoding_options.items()}
    return {**plain, **encoding, **{f"task.{name}": value for name, value in config.task_options.items()}}


def in_json(values: Mapping[str, Value], name: str) -> str:
    """Returns one of some values in JSON, or that it is not given."""
    return json.dumps(values[name]) if name in values else "not given"


def with_fields(config: Config, changes: Mapping[str, Value]) -> Config:
    """Returns a config with other values of some fields; `encoding.NAME` and `task.NAME` are options of the two."""
    plain: dict[str, Value] = {}
    nested = {"encoding": dict(config.encoding_options), "task": dict(config.task_options)}
    for name, value in changes.items():
        group, _, option = name.partition(".")
        if option:
            if group not in nested:
                raise ValueError(f"{name!r} is no field: options of the encoding and of the task are encoding.NAME and task.NAME")
            nested[group][option] = value
        elif name not in FIELDS:
            raise ValueError(f"{name!r} is no field of a run{nearest(name, FIELDS)}")
        else:
            plain[name] = checked_value(name, value)
    options = {"encoding_options": nested["encoding"], "task_options": nested["task"]}
    return replace(config, **{**options, **plain})


def parse_fields(assignments: Iterable[str]) -> dict[str, Value]:
    """Returns the fields of words such as `dim=256`, whose values are those of JSON, or plain words."""
    found = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"fields are given as NAME=VALUE, such as dim=256, but {assignment!r} was given")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = {"none": None}.get(text.lower(), text)
    return found


def checked_value(name: str, value: Value) -> Value:
    """Returns the value of a field in its type, and raises for one of another type."""
    kind = get_type_hints(Config)[name]
    allowed = get_args(kind) if get_origin(kind) is not Literal and get_origin(kind) not in (tuple, dict) else (kind,)
    for each in allowed or (kind,):
        if get_origin(each) is Literal and value in get_args(each):
            return value
        if get_origin(each) is tuple and isinstance(value, list | tuple | int):
            numbers = (value,) if isinstance(value, int) else tuple(value)
            if all(isinstance(number, int) for number in numbers):
                return numbers
        if each is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if each is type(None) and value is None:
            return None
        if isinstance(each, type) and isinstance(value, each) and isinstance(value, bool) == (each is bool):
            return value
        if get_origin(each) is dict and isinstance(value, dict):
            return value
    words = " or ".join(
        ", ".join(map(repr, get_args(each))) if get_origin(each) is Literal else getattr(each, "__name__", str(each)).replace(
            "NoneType", "none"
        )
        for each in (allowed or (kind,))
    )  # fmt: skip
    raise ValueError(f"{name} must be {words}, but is {value!r}")
