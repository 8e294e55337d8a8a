"""Made-up sentences and pairs of sentences in the place of GLUE's own."""

from lagwise.lab.tasks.choices import Chooser
from lagwise.lab.tasks.text.glue_files import Item, Layout

WHO = ("The pilot", "A young cook", "Our librarian", "The tailor", "An engineer", "The twins", "A beekeeper", "The mayor")
DID = ("repaired", "borrowed", "described", "lost", "polished", "bought", "dropped", "measured")
WHAT = ("a brass compass", "the green bicycle", "an old violin", "three clay jars", "the garden gate", "a woollen coat")
WHERE = ("near the harbour", "before breakfast", "in the attic", "after the concert", "on Tuesday", "at the fair")
TASTES = {"bad": ("dull", "clumsy", "dreary", "sloppy"), "good": ("delightful", "clever", "brilliant", "charming")}
SAMPLE_SIZES = {"train": 120, "dev": 36, "test": 12}


def sample_items(layout: Layout, part: str) -> list[Item]:
    """Returns made-up examples in the place of an official part, as many of each class."""
    names = ("train", *layout.dev, *layout.test)
    one_of = Chooser(names.index(part))

    def item(kind: int) -> Item:
        label = kind if layout.labels else 2.5 * kind
        return Item(sample_texts(layout.relations[kind], one_of), float(label))

    return [item(index % len(layout.relations)) for index in range(SAMPLE_SIZES[part.split("_")[0]])]


def sample_texts(relation: str, one_of: Chooser) -> tuple[str, ...]:
    """Returns a text, or two that have something to do with each other."""
    who, did, what, where = one_of(WHO), one_of(DID), one_of(WHAT), one_of(WHERE)
    first = f"{who} {did} {what} {where}."
    if relation in TASTES:
        tastes = TASTES[relation]
        return (f"A {one_of(tastes)} and {one_of(tastes)} film of {what}, {one_of(tastes)} throughout.",)
    seconds = {
        "same": f"It was {where} that {who.lower()} {did} {what}.",
        "near": f"{who} {did} something.",
        "other": f"Rain fell {one_of(WHERE)}, and nobody was there.",
        "opposite": f"{who} never {did} {what}.",
    }
    if relation in seconds:
        return first, seconds[relation]
    return (first,) if relation == "plain" else (f"{what} of {who.lower()} {where} of {did}.",)
