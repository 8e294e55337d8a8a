"""The loop of training and evaluation, on one device or many, through Hugging Face Accelerate."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from lagwise.encodings import Encoding
from lagwise.feature_maps import Favor
from lagwise.lab.checkpoint import Checkpoint, save_checkpoint
from lagwise.lab.config import Config
from lagwise.lab.curves import OWN
from lagwise.lab.data import Order, evaluation_batches, training_batches
from lagwise.lab.experiment import make_task
from lagwise.lab.memory import peak_memory
from lagwise.lab.run_folder import Run
from lagwise.lab.schedule import factor
from lagwise.lab.signals import Interrupted, stop_on_signal
from lagwise.lab.tasks.base import Batch, Split
from lagwise.lab.warm_start import start_folder, start_from

Watch = Callable[[dict[str, Any]], None]
"""Is told of each report: `step`, and `loss`, or `split` with its metrics."""

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


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


def data_words(settings: Settings) -> str:
    """Returns where the data of a run comes from, as its environment says it."""
    return "generated or built-in sample" if settings.data is None else str(settings.data)


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
        self.accelerator.backward(total * self.accelerator.num_processes / self.sum_over_processes(count.detach()))
        if config.clip:
            self.accelerator.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums += torch.stack([total.detach().double(), count.double()])
        self.step += 1

    def report(self) -> float:
        """Returns the mean loss since the last report; raises where it is not finite."""
        total, count = self.sum_over_processes(self.sums).tolist()
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
        total, count = (self.sum_over_processes(sums) if shared else sums).tolist()
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
        save_checkpoint(self.run.checkpoints, Checkpoint(self.step, tensors, state), keep=self.settings.keep)

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

    def sum_over_processes(self, x: Tensor) -> Tensor:
        """Returns the sum over all processes."""
        found: Any = self.accelerator.reduce(x.clone(), "sum") if self.accelerator.num_processes > 1 else x
        return found

    @property
    def bare_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate around it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


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
            stops = bool(stopped) if session.accelerator.num_processes == 1 else reports and any_stopped(session, bool(stopped))
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
        if any_stopped(session, bool(stopped)):
            raise Interrupted(f"saved after step {session.step}; the same command with --resume goes on")


def any_stopped(session: Session, stopped: bool) -> bool:
    """Says whether any process was asked to stop."""
    return bool(session.sum_over_processes(torch.tensor(float(stopped), device=session.device)) > 0)


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


def evaluate_at(session: Session, length: int, split: Split = "test") -> dict[str, Any]:
    """Evaluates a split at another length; an encoding that ends before it is told about instead."""
    try:
        return session.evaluate(split, length)
    except ValueError as error:
        return {"refused": str(error)}


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
