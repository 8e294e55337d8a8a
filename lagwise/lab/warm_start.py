"""Models that start from the weights of a trained run."""

from glob import glob, has_magic
from pathlib import Path

from torch import nn

from lagwise.lab.checkpoint import checkpoint_of, steps_in
from lagwise.lab.config import Config
from lagwise.lab.run_folder import Run


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
