"""Tasks to train and compare encodings on, by name."""

from lagwise.errors import nearest
from lagwise.tasks.artificial import Adding, Process50, Reber
from lagwise.tasks.base import Batch, Examples, Facts, Sequences, Split, Task, Tensors
from lagwise.tasks.glue import Cola, Mnli, Mrpc, Qnli, Qqp, Rte, Sst2, Stsb, Wnli
from lagwise.tasks.image import Image
from lagwise.tasks.listops import ListOps
from lagwise.tasks.lm import LanguageModel
from lagwise.tasks.music import Groove, Piano
from lagwise.tasks.pathfinder import Pathfinder
from lagwise.tasks.retrieval import Retrieval
from lagwise.tasks.sentences import Cr, ImdbWords, Mpqa, Mr, SstWords, Subj, Trec
from lagwise.tasks.squad import Squad
from lagwise.tasks.text import Text
from lagwise.tasks.translation import Translate

TASKS: dict[str, type[Task]] = {
    "reber": Reber,
    "process-50": Process50,
    "adding": Adding,
    "listops": ListOps,
    "text": Text,
    "retrieval": Retrieval,
    "image": Image,
    "pathfinder": Pathfinder,
    "lm": LanguageModel,
    "piano": Piano,
    "groove": Groove,
    "squad": Squad,
    "translation": Translate,
    "glue/cola": Cola,
    "glue/sst2": Sst2,
    "glue/mrpc": Mrpc,
    "glue/stsb": Stsb,
    "glue/qqp": Qqp,
    "glue/mnli": Mnli,
    "glue/qnli": Qnli,
    "glue/rte": Rte,
    "glue/wnli": Wnli,
    "mr": Mr,
    "subj": Subj,
    "cr": Cr,
    "mpqa": Mpqa,
    "sst2-words": SstWords,
    "trec": Trec,
    "imdb-words": ImdbWords,
}


def task_named(name: str) -> type[Task]:
    """Returns a task's class; an unknown name raises and offers the nearest."""
    if name not in TASKS:
        raise ValueError(f"{name!r} is no task{nearest(name, TASKS)} `lagwise tasks` lists all")
    return TASKS[name]


__all__ = ["TASKS", "Batch", "Examples", "Facts", "Sequences", "Split", "Task", "Tensors", "task_named"]
