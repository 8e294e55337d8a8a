"""Training and evaluation, on one device or many, through Hugging Face Accelerate."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from glob import glob, has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState, is_initialized
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lagwise.encodings import Encoding, canonical_name
from lagwise.feature_maps import Favor
from lagwise.lab.bench.cases import machine
from lagwise.lab.bench.timing import peak_memory
from lagwise.lab.checkpoint import Checkpoint, load_latest, save, steps_in
from lagwise.lab.config import Config, difference_words, with_fields
from lagwise.lab.curves import OWN
from lagwise.lab.data import Order, evaluation_batches, is_dead_worker, training_batches
from lagwise.lab.lock import owned
from lagwise.lab.schedule import factor
from lagwise.lab.signals import interrupt, on_signal, stop_on_signal
from lagwise.lab.store import CONFIG, Run, config_of, is_same_place
from lagwise.lab.tasks import task_named
from lagwise.lab.tasks.base import Batch, Split, Task
from lagwise.lens.learned import learned_priors

Watch = Callable[[dict[str, Any]], None]
"""Is told of each report: `step`, and `loss`, or `split` with its metrics."""

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


GO_ON = "Run it again to go on, `lagwise train` with --resume"


class Interrupted(KeyboardInterrupt):
    """Training was stopped by the user; the words say what is saved."""


class Halted(OSError):
    """The machine ended a run: a full disk, a process that was killed; the words say what is saved."""


class Diverged(ArithmeticError):
    """The loss is no finite number."""


@dataclass(frozen=True)
class Settings:
    """How a run is carried out, which does not change what it computes.

    Args:
        data: The folder of the official files, "hub", or None, see `Task`.
        device: "cpu", "cuda", or None for what Accelerate finds.
        report_every: Steps between reports of the loss.
        save_every: Steps between checkpoints; 0 for one at the end.
        keep: How many checkpoints stay.
        workers: Processes that make batches; two for a GPU and none beside the training's own for a CPU unless given.
        tracker: Where Accelerate sends the numbers beside the run's folder: "tensorboard", "wandb", ...; None for nowhere.
    """

    data: Path | str | None = None
    device: str | None = None
    report_every: int = 20
    save_every: int = 500
    keep: int = 2
    workers: int | None = None
    tracker: str | None = None


def make_config(task: str, encoding: str | None = None, *, preset: str = "", **changes: Any) -> Config:
    """Returns the config of a task with its defaults, those of a preset, and given fields, later ones counting more.

    With another encoding than the preset's, the preset gives everything but the options of its encoding; where a second preset
    differs from it in the encoding alone, that one gives them, as far as the task has none that suit it.

    >>> make_config("process-50", "at5", dim=32).dim
    32
    """
    kind = task_named(task)
    if preset and preset not in kind.presets:
        known = ", ".join(kind.presets) or "none"
        raise ValueError(f"preset must be one of {task}'s ({known}), but is {preset!r}")
    given = dict(kind.presets[preset]) if preset else {}
    name = canonical_name(changes.pop("encoding", None) or encoding or given.get("encoding", "t5"))
    beside: dict[str, Any] = {}
    if given.get("encoding", name) != name:
        given = but_encoding(given)
        alike = (other for other in kind.presets.values() if other.get("encoding") == name and but_encoding(other) == given)
        beside = next(alike, {}).get("encoding_options", {})
    config = Config(task, name, preset)
    for fields in (kind.defaults, {**given, "encoding": name}, changes):
        config = with_fields(config, fields)
    suited = kind(**config.task_options).encoding_options(name)
    return replace(config, encoding_options={**beside, **suited, **config.encoding_options})


def but_encoding(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a preset that are not about its encoding."""
    return {field: value for field, value in preset.items() if field not in ("encoding", "encoding_options", "per_layer")}


def make_task(config: Config, data: Path | str | None) -> Task:
    """Returns the task of a config."""
    seed = config.seed if config.data_seed is None else config.data_seed
    return task_named(config.task)(data, seed=seed, **config.task_options)


class Session:
    """A model in training: all that a checkpoint has to hold, and what a step does with it."""

    def __init__(self, config: Config, settings: Settings, run: Run | None = None):
        self.config, self.settings, self.run = config, settings, run
        self.accelerator = make_accelerator(config, settings, run)
        self.device = self.accelerator.device
        gpu = self.device.type == "cuda"
        self.input: dict[str, Any] = {"workers": (2 if gpu else 0) if settings.workers is None else settings.workers, "pin": gpu}
        processes = self.accelerator.num_processes
        if config.batch % processes:
            raise ValueError(f"batch must be a multiple of the {processes} processes, but is {config.batch}")
        self.task = make_task(config, settings.data)
        if run is not None:
            self.task.attach(run.folder)
        # All processes start from the same weights and draw the same codes; each sees its own share of a batch.
        torch.manual_seed(config.seed)
        model = self.task.model(config)
        if config.start:
            start_from(model, start_folder(config))
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.encoding_parameters = sum(parameter.numel() for parameter in encoding_parameters(model).values())
        optimizer = make_optimizer(model, config)
        self.model: nn.Module
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.peak_memory: int | None = None
        # The sum of the loss and the number of items since the last report.
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)

    def train_step(self, batch: Batch) -> None:
        """Trains on a batch, and counts it."""
        config = self.config
        rate = factor(config.schedule, self.step, steps=config.steps, warmup=config.warmup)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * rate
        if config.redraw and self.step % config.redraw == 0:
            redraw(self.model)
        self.tokens += self.task.tokens(batch) * self.accelerator.num_processes
        batch = to_device(batch, self.device)
        total, count = self.task.loss(self.model(batch), batch)
        # Gradients are averaged over the processes, which may have different numbers of items.
        self.accelerator.backward(total * self.accelerator.num_processes / self.summed(count.detach()))
        if config.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums += torch.stack([total.detach().double(), count.double()])
        self.step += 1

    def report(self) -> float:
        """Returns the mean loss since the last report; raises where it is not finite."""
        total, count = self.summed(self.sums).tolist()
        self.sums.zero_()
        loss = total / max(count, 1.0)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} at step {self.step}: the last checkpoint is from before. Try a smaller rate "
                f"({self.config.rate:g} now), more warmup ({self.config.warmup} steps now) or precision=fp32"
            )
        return loss

    @torch.no_grad()
    def evaluate(self, split: Split, length: int | None = None) -> dict[str, float]:
        """Returns the loss and the metrics on a split."""
        accelerator, task = self.accelerator, self.task
        # A sharded model has to be called by all processes at once: there each evaluates everything.
        shared = accelerator.num_processes > 1 and accelerator.distributed_type != DistributedType.FSDP
        ranks = {"rank": accelerator.process_index, "processes": accelerator.num_processes} if shared else {}
        metrics = {name: metric.to(self.device) for name, metric in task.metrics().items()}
        for metric in metrics.values():
            metric.sync_on_compute = shared
        model = accelerator.unwrap_model(self.model) if shared else self.model
        was_training = model.training
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = evaluation_batches(
            task.examples(split, length), self.config.evaluate_batch or self.config.batch, limit=self.config.evaluate_examples,
            **self.input, **ranks,
        )  # fmt: skip
        for batch in batches:
            batch = to_device(batch, self.device)
            with accelerator.autocast():
                outputs = model(batch)
            total, count = task.loss(outputs, batch)
            sums += torch.stack([total.double(), count.double()])
            given = task.measured(model, outputs, batch)
            for metric in metrics.values():
                metric.update(*given)
        model.train(was_training)
        total, count = (self.summed(sums) if shared else sums).tolist()
        return {"loss": total / max(count, 1.0), **{name: float(metric.compute()) for name, metric in metrics.items()}}

    def save(self) -> None:
        """Writes a checkpoint, once for all processes."""
        assert self.run is not None
        model = get_model_state_dict(self.model, options=FULL)
        optimizer: Any = get_optimizer_state_dict(self.model, self.bare_optimizer, options=FULL)
        # All processes gather, and the main one alone gets what was gathered.
        if not self.accelerator.is_main_process:
            return
        slots = {f"{name}/{slot}": x for name, own in optimizer["state"].items() for slot, x in own.items()}
        scaler = self.accelerator.scaler
        state = {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "peak_memory": self.peak_memory,
            "scaler": scaler.state_dict() if scaler is not None else None,
            "config": self.config.to_json(),
            "data": data_words(self.settings),
        }
        tensors: dict[str, dict[str, Any]] = {
            "model": model,
            "optimizer": slots,
            "random": random_state(self.device),
            "sums": {"sums": self.sums},
        }
        save(self.run.checkpoints, Checkpoint(self.step, tensors, state), keep=self.settings.keep)

    def load(self, checkpoint: Checkpoint) -> None:
        """Goes back to a checkpoint."""
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(self.model, dict(checkpoint.tensors["model"]), options=options)
        slots: Any = {}
        for name, x in checkpoint.tensors["optimizer"].items():
            parameter, _, slot = name.rpartition("/")
            slots.setdefault(parameter, {})[slot] = x
        groups = get_optimizer_state_dict(self.model, self.bare_optimizer, options=options)["param_groups"]
        set_optimizer_state_dict(self.model, self.bare_optimizer, {"state": slots, "param_groups": groups}, options=options)
        if checkpoint.state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(checkpoint.state["scaler"])
        self.step, self.seconds, self.tokens = checkpoint.step, checkpoint.state["seconds"], checkpoint.state["tokens"]
        self.peak_memory = checkpoint.state["peak_memory"]
        self.sums.copy_(checkpoint.tensors["sums"]["sums"])
        set_random_state(checkpoint.tensors["random"], self.device)

    def summed(self, x: Tensor) -> Tensor:
        """Returns the sum over all processes."""
        found: Any = self.accelerator.reduce(x.clone(), "sum") if self.accelerator.num_processes > 1 else x
        return found

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def train(
    config: Config, folder: Path, settings: Settings, *, resume: bool = False, watch: Watch | None = None
) -> dict[str, Any]:
    """Trains a model, or goes on with it, and returns the final numbers, which are in the run's folder too.

    Args:
        config: What to run.
        folder: The run's folder.
        settings: How to run it.
        resume: Go on from the newest whole checkpoint, if there is one.
        watch: Is told how it goes.
    """
    with on_signal(interrupt), telling_what_is_saved(Run(folder)), begun(config, folder, settings) as run:
        session = Session(config, settings, run)
        checkpoint = checkpoint_of(run, data=data_words(settings))
        if checkpoint is not None and not resume:
            raise ValueError(f"{folder} holds a run that was begun: pass --resume to go on with it, or choose another folder")
        if checkpoint is not None:
            session.load(checkpoint)
        if session.accelerator.is_main_process:
            run.forget_after(session.step)
        session.accelerator.wait_for_everyone()
        run_steps(session, watch)
        result = final_numbers(session, watch)
        # A sharded model is gathered by all processes together.
        model = whole_model(session)
        if session.accelerator.is_main_process:
            result["curves"] = curves_at(session, model, result["lengths"])
            run.finish(result, learned_priors(model, session.task.length))
        # A group of processes that ends right after it gathered tensors waits for ever for a thread of its own, which waits for
        # Python. While it waits for the others, that thread gets there.
        session.accelerator.wait_for_everyone()
        session.accelerator.end_training()
    return result


@contextmanager
def begun(config: Config, folder: Path, settings: Settings) -> Iterator[Run]:
    """Makes a run's folder, or takes one of the same run, and owns it; all processes of the run have to call this.

    The main process is the owner. What it refuses is raised by all, so that none waits for it.
    """
    refusal: list[ValueError | OSError | None] = [None]
    with ExitStack() as stack:
        if PartialState(cpu=settings.device == "cpu").is_main_process:
            device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
            try:
                stack.enter_context(owned(folder))
                Run.create(folder, config, {**machine(device), "data": data_words(settings)})
            except (ValueError, OSError) as error:
                refusal = [error]
        broadcast_object_list(refusal)
        if refusal[0] is not None:
            raise refusal[0]
        yield Run(folder)


@contextmanager
def telling_what_is_saved(run: Run) -> Iterator[None]:
    """Says what of a run is saved where something from outside ends it."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        raise Interrupted(f"stopped at once, and saved nothing more: {saved_words(run)}. {GO_ON}") from error
    except OSError as error:
        raise Halted(f"{run.folder} could not go on: {error}; {saved_words(run)}. {GO_ON}") from error
    except RuntimeError as error:
        if not is_dead_worker(error):
            raise
        raise Halted(
            f"{run.folder} could not go on: a process that makes batches has ended, perhaps for lack of memory (give fewer "
            f"--workers): {error}; {saved_words(run)}. {GO_ON}"
        ) from error


def saved_words(run: Run) -> str:
    """Returns from where a run can go on."""
    paths = steps_in(run.checkpoints)
    return f"{paths[-1]} is saved" if paths else f"there is no checkpoint in {run.folder}"


def checkpoint_of(run: Run, *, data: str | None = None) -> Checkpoint | None:
    """Returns the newest whole checkpoint of a run, or None; raises for one of another run.

    Args:
        run: The run.
        data: Where the data comes from that it must have been trained on; None for any.
    """
    found = load_latest(run.checkpoints)
    if found is not None:
        place = f"the checkpoint of step {found.step} in {run.checkpoints}"
        check_config(run, found.state, place)
        if data is not None and not is_same_place(there := found.state.get("data", data), data):
            raise ValueError(f"{place} was trained on other data ({there}, not {data}): put back the run's own, or delete it")
    return found


def check_config(run: Run, state: Mapping[str, Any], place: str) -> None:
    """Raises where the state of a checkpoint has another config than its run."""
    if words := difference_words(config_of(state["config"], place), run.config):
        raise ValueError(
            f"{place} is of another run than {run.folder / CONFIG} says ({words}): put back the run's own, or choose another "
            "folder"
        )


def data_words(settings: Settings) -> str:
    """Returns where the data of a run comes from, as its environment says it."""
    return "generated or built-in sample" if settings.data is None else str(settings.data)


def run_steps(session: Session, watch: Watch | None) -> None:
    """Trains from the session's step to the last, with reports, evaluations and checkpoints."""
    config, settings = session.config, session.settings
    examples = session.task.examples("train")
    used = len(examples) if config.examples is None else min(config.examples, len(examples))
    session.model.train()
    began = time.perf_counter()
    with stop_on_signal() as stopped:
        batches = training_batches(
            examples, Order(examples=used, batch=config.batch, seed=config.seed), session.step, config.steps,
            rank=session.accelerator.process_index, processes=session.accelerator.num_processes, **session.input,
        )  # fmt: skip
        for batch in batches:
            if session.step == 1:
                # The first step makes the optimizer's state and whatever is made once.
                session.peak_memory = peak_memory(lambda batch=batch: session.train_step(batch), session.device)
            else:
                session.train_step(batch)
            saves = session.step == config.steps or (settings.save_every > 0 and session.step % settings.save_every == 0)
            evaluates = config.evaluate_every > 0 and session.step % config.evaluate_every == 0
            reports = saves or evaluates or session.step % settings.report_every == 0
            # Processes must agree on where to stop, and ask each other at reports alone.
            stops = bool(stopped) if session.accelerator.num_processes == 1 else reports and agreed(session, bool(stopped))
            if not (reports or stops):
                continue
            loss = session.report()
            session.seconds += time.perf_counter() - began
            done = {"seconds": round(session.seconds, 3), "tokens": session.tokens}
            tell(session, watch, {"step": session.step, "loss": loss, **done})
            if saves or stops:
                session.save()
            if stops:
                break
            if evaluates and session.step < config.steps:
                tell(session, watch, {"step": session.step, "split": "validation", **session.evaluate("validation")})
            began = time.perf_counter()
        if agreed(session, bool(stopped)):
            raise Interrupted(f"saved after step {session.step}; the same command with --resume goes on")


def final_numbers(session: Session, watch: Watch | None) -> dict[str, Any]:
    """Evaluates the trained model and returns all numbers of the run."""
    result: dict[str, Any] = {
        "parameters": session.parameters,
        "encoding_parameters": session.encoding_parameters,
        "steps": session.step,
        "seconds": round(session.seconds, 3),
        "tokens_per_second": round(session.tokens / session.seconds, 1) if session.seconds else None,
        "peak_memory": session.peak_memory,
        "sample": session.task.is_sample,
    }
    splits: tuple[Split, ...] = ("validation", "test")
    for split in splits:
        result[split] = session.evaluate(split)
        tell(session, watch, {"step": session.step, "split": split, **result[split]})
    result["lengths"] = {}
    for length in session.config.lengths:
        result["lengths"][str(length)] = found = at_length(session, length)
        tell(session, watch, {"step": session.step, "split": "test", "length": length, **found})
    return result


def whole_model(session: Session) -> nn.Module:
    """Returns the model with all its weights in the main process, in evaluation mode; all processes have to call this."""
    if session.accelerator.distributed_type != DistributedType.FSDP:
        return session.accelerator.unwrap_model(session.model).eval()
    weights = get_model_state_dict(session.model, options=FULL)
    model = session.task.model(session.config)
    if session.accelerator.is_main_process:
        model.load_state_dict(weights)
    return model.eval()


def curves_of(session: Session, model: nn.Module, split: Split, length: int | None) -> dict[str, Any]:
    """Returns what the task stores of an evaluation of the whole model beside its numbers."""
    config = session.config
    return session.task.curves(model, split, length, batch=config.evaluate_batch or config.batch, limit=config.evaluate_examples)


def curves_at(session: Session, model: nn.Module, lengths: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the curves of the test split at the run's own length, and at others that the model takes, by the length."""
    taken = {OWN: None, **{length: int(length) for length, found in lengths.items() if "refused" not in found}}
    found = {name: curves_of(session, model, "test", length) for name, length in taken.items()}
    return {name: own for name, own in found.items() if own}


def at_length(session: Session, length: int, split: Split = "test") -> dict[str, Any]:
    """Evaluates a split at another length; an encoding that ends before it is told about instead."""
    try:
        return session.evaluate(split, length)
    except ValueError as error:
        return {"refused": str(error)}


def tell(session: Session, watch: Watch | None, line: dict[str, Any]) -> None:
    """Writes a line of the metrics, and shows and tracks it."""
    if not session.accelerator.is_main_process:
        return
    if session.run is not None:
        session.run.log(line)
    prefix = f"{line['split']}/" if "split" in line else "train/"
    numbers = {prefix + name: x for name, x in line.items() if isinstance(x, int | float) and name not in ("step", "length")}
    if "length" not in line:
        session.accelerator.log(numbers, step=line["step"])
    if watch is not None:
        watch(line)


def make_accelerator(config: Config, settings: Settings, run: Run | None) -> Accelerator:
    """Returns what knows the devices and processes."""
    precision = "no" if config.precision == "fp32" else config.precision
    tracker = settings.tracker if run is not None else None
    # A process may do one run after the other, and Accelerate would refuse another precision than that of the first one, which
    # is over by then.
    if is_initialized() and (state := AcceleratorState()).mixed_precision != precision and state.num_processes == 1:
        AcceleratorState._reset_state()
    accelerator = Accelerator(
        cpu=settings.device == "cpu", mixed_precision=precision, log_with=tracker, project_dir=None if run is None else run.folder
    )
    if tracker is not None:
        accelerator.init_trackers("lagwise", config={name: str(value) for name, value in config.to_json().items()})
    return accelerator


def start_folder(config: Config) -> Path:
    """Returns the run that a config starts from: the folder that `start` names, or the one run that it describes.

    In a description `{encoding}` and `{seed}` stand for those of the config, and `*`, `?` and `[...]` for other letters.
    """
    words = config.start.replace("{encoding}", config.encoding).replace("{seed}", str(config.seed))
    if Path(words).is_dir() or not has_magic(words):
        return Path(words)
    found = [path for path in map(Path, sorted(glob(words))) if steps_in(Run(path).checkpoints)]
    if len(found) != 1:
        shown = ", ".join(map(str, found)) if found else "none"
        raise ValueError(
            f"start must describe one run with a checkpoint, but {words} describes {len(found)} ({shown}): write more of its "
            "name, or train one first"
        )
    return found[0]


def start_from(model: nn.Module, folder: Path) -> None:
    """Gives a model the embedding and the encoder of a trained one, or the body of one of Hugging Face."""
    run = Run.open(folder)
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        raise ValueError(f"start must be a run with a checkpoint, but {folder} has none")
    if (check := getattr(model, "check_start", None)) is not None:
        check(run.config)
    given = checkpoint.tensors["model"]
    names = shared_names(model)
    wanted = {name: x for name, x in model.state_dict().items() if name in names}
    wrong = [
        f"{name} is {list(given[name].shape)} there and {list(x.shape)} here" if name in given else f"{name} is missing there"
        for name, x in wanted.items() if name not in given or given[name].shape != x.shape
    ]  # fmt: skip
    if wrong or not wanted:
        raise ValueError(
            f"start must be a run whose embedding and encoder have the sizes of this one, but is {folder}, and "
            f"{wrong[0] if wrong else 'the model has neither'}: use the same encoding with the same options, sizes and tokens"
        )
    model.load_state_dict({name: given[name] for name in wanted}, strict=False)


def shared_names(model: nn.Module) -> set[str]:
    """Returns the names of the embedding and the encoder; a model may have names of its own for them."""
    own = getattr(model, "shared_names", None)
    return set(own()) if own is not None else {name for name in model.state_dict() if name.startswith(("embedding.", "encoder."))}


def default_tracker() -> str | None:
    """Returns "tensorboard" where it is installed."""
    return "tensorboard" if find_spec("tensorboard") is not None else None


def encoding_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of all position encodings in a model, by name."""
    found = {}
    for prefix, module in model.named_modules():
        if isinstance(module, Encoding):
            found |= {f"{prefix}.{name}" if prefix else name: parameter for name, parameter in module.named_parameters()}
    return found


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """Returns AdamW, with groups for weights, for those that do not decay, and for encodings."""
    own = {id(parameter) for parameter in encoding_parameters(model).values()}
    groups: dict[str, list[nn.Parameter]] = {"weights": [], "others": [], "encodings": []}
    for parameter in model.parameters():
        name = "encodings" if id(parameter) in own else "weights" if parameter.ndim > 1 else "others"
        groups[name].append(parameter)
    described = [
        {
            "params": parameters,
            "lr": config.rate * (config.encoding_rate if name == "encodings" else 1.0),
            "weight_decay": config.weight_decay if name == "weights" else 0.0,
        }
        for name, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(described, betas=(config.beta1, config.beta2), fused=True)


def redraw(model: nn.Module) -> None:
    """Draws the random features of every "favor" map anew."""
    for module in model.modules():
        if isinstance(module, Favor):
            module.redraw()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Returns a batch on a device."""
    return {name: x.to(device, non_blocking=True) for name, x in batch.items()}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns where the random numbers stand."""
    return {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Any, device: torch.device) -> None:
    """Goes on with the random numbers of a checkpoint."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def agreed(session: Session, stopped: bool) -> bool:
    """Says whether any process was asked to stop."""
    return bool(session.summed(torch.tensor(float(stopped), device=session.device)) > 0)
