"""Tasks to train and compare encodings on, by name."""

from lagwise.errors import nearest
from lagwise.lab.tasks.base import Batch, Examples, Facts, Sequences, Split, Task, Tensors
from lagwise.lab.tasks.lra.byte_text import Text
from lagwise.lab.tasks.lra.image import Image
from lagwise.lab.tasks.lra.listops import ListOps
from lagwise.lab.tasks.lra.pathfinder import Pathfinder
from lagwise.lab.tasks.lra.retrieval import Retrieval
from lagwise.lab.tasks.music.groove import Groove
from lagwise.lab.tasks.music.piano import Piano
from lagwise.lab.tasks.synthetic import Adding, Process50, Reber
from lagwise.lab.tasks.text.glue_tasks import Cola, Mnli, Mrpc, Qnli, Qqp, Rte, Sst2, Stsb, Wnli
from lagwise.lab.tasks.text.lm import LanguageModel
from lagwise.lab.tasks.text.sentence_sets import Cr, ImdbWords, Mpqa, Mr, SstWords, Subj, Trec
from lagwise.lab.tasks.text.squad import Squad
from lagwise.lab.tasks.text.translation import Translate

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
