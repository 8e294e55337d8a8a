"""Questions on articles: the official files of SQuAD 1.1, and a sample of our own."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from lagwise.lab.tasks.base import HUB
from lagwise.lab.tasks.files import from_hub, open_bytes, required_file

ON_THE_HUB = "rajpurkar/squad"

Part = Literal["train", "validation", "dev"]


FILES: dict[Part, str] = {"train": "train-v1.1.json", "dev": "dev-v1.1.json"}
SOURCE = (
    "get train-v1.1.json and dev-v1.1.json from https://rajpurkar.github.io/SQuAD-explorer/, or divide one file with "
    "task.split_articles=0.8 task.split_file=NAME"
)


class Question(NamedTuple):
    """A question, where its answer is looked for, and the answers that count."""

    key: str
    text: str
    context: str
    answers: tuple[str, ...]
    start: int
    """Where in the context the first answer begins."""


class Article(NamedTuple):
    """The questions on an article."""

    title: str
    questions: list[Question]


def read_articles(data: Path | str, name: str) -> list[Article]:
    """Returns the articles of an official file, or of the same part on the Hub."""
    if data == HUB:
        return articles_of_rows(from_hub(ON_THE_HUB, "train" if name == FILES["train"] else "validation"))
    path = required_file(data, name.removesuffix(".xz").removesuffix(".gz"), SOURCE)
    found = [article_of(f"{path}, {place}", entry) for place, entry in list_entries(str(path), read_squad(path), "data")]
    counts = Counter(asked.key for article in found for asked in article.questions)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f"{path}: the id {twice[0]!r} is there twice, but expected is another one for each question")
    return found


def read_squad(path: Path) -> Any:
    """Returns the content of a JSON file, plain or compressed."""
    try:
        with open_bytes(path) as file:
            return json.loads(file.read())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}, but expected is a JSON file of SQuAD 1.1") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line 1: the text is not UTF-8 ({error}), but expected is a JSON file of SQuAD 1.1") from error


def typed_field(place: str, entry: Any, name: str, kind: type) -> Any:
    """Returns a field of an entry, which must be of a type."""
    if not isinstance(entry, dict) or not isinstance(entry.get(name), kind) or isinstance(entry[name], bool):
        shown = repr(entry.get(name))[:40] if isinstance(entry, dict) and name in entry else "missing"
        words = {str: "a text", int: "a whole number", list: "a list"}[kind]
        raise ValueError(f"{place}: {name} is {shown}, but expected is {words}, as in the files of SQuAD 1.1")
    return entry[name]


def list_entries(place: str, entry: Any, name: str) -> list[tuple[str, Any]]:
    """Returns the entries of a list in an entry, each with its place in it; an empty list raises."""
    found = typed_field(place, entry, name, list)
    if not found:
        raise ValueError(f"{place}: {name} is empty, but expected is one entry at least, as in the files of SQuAD 1.1")
    return [(f"{name}[{number}]", each) for number, each in enumerate(found)]


def article_of(place: str, entry: Any) -> Article:
    """Returns the questions of an article of an official file."""
    asked = []
    for paragraph_place, paragraph in list_entries(place, entry, "paragraphs"):
        context_place = f"{place}.{paragraph_place}"
        context = typed_field(context_place, paragraph, "context", str)
        for question_place, question in list_entries(context_place, paragraph, "qas"):
            asked.append(question_of(f"{context_place}.{question_place}", question, context))
    return Article(typed_field(place, entry, "title", str), asked)


def question_of(place: str, entry: Any, context: str) -> Question:
    """Returns a question of an official file."""
    answers = []
    for answer_place, answer in list_entries(place, entry, "answers"):
        own_place = f"{place}.{answer_place}"
        text, start = typed_field(own_place, answer, "text", str), typed_field(own_place, answer, "answer_start", int)
        if not 0 <= start <= len(context) - len(text):
            raise ValueError(
                f"{own_place}: answer_start is {start}, but expected is a place in the context of {len(context)} "
                f"characters that leaves room for the answer of {len(text)}"
            )
        answers.append((text, start))
    texts = tuple(text for text, _ in answers)
    return Question(
        typed_field(place, entry, "id", str), typed_field(place, entry, "question", str), context, texts, answers[0][1]
    )


def articles_of_rows(rows: Iterable[Mapping[str, Any]]) -> list[Article]:
    """Returns the articles of rows with one question each, as the Hub has them."""
    found: dict[str, list[Question]] = {}
    for row in rows:
        answers = row["answers"]
        asked = Question(row["id"], row["question"], row["context"], tuple(answers["text"]), answers["answer_start"][0])
        found.setdefault(row["title"], []).append(asked)
    return [Article(title, asked) for title, asked in found.items()]


def divide_articles(articles: Sequence[Article], share: float, option: str, *, salt: str) -> tuple[list[Article], list[Article]]:
    """Returns a share of the articles, and the others, both by title.

    Each title has its place in an order of digests, which is the same everywhere, whatever the order of a file is.

    Args:
        articles: With different titles.
        share: Of the first part.
        option: What the share is called, for the error.
        salt: Another one gives another order.
    """
    count = round(share * len(articles))
    if not 0 < count < len(articles):
        raise ValueError(
            f"{option} must leave an article on both sides of {len(articles)}, but is {share}: choose another share or file"
        )
    order = sorted(articles, key=lambda article: sha256(f"{salt}{article.title}".encode()).hexdigest())
    first, second = (sorted(part, key=lambda article: article.title) for part in (order[:count], order[count:]))
    return first, second


PEOPLE = ("Ada", "Bruno", "Cora", "Dario", "Elsa", "Fabio", "Greta", "Henk", "Ines", "Jonas", "Katya", "Luis")
FAMILIES = ("Marsh", "Novak", "Olsen", "Pereira", "Quist", "Rossi", "Sato", "Tamm")
PLACES = ("Arlem", "Bostra", "Cavell", "Dunmoor", "Eskvik", "Farrow", "Gilan", "Hestad", "Istria", "Jurby")
JOBS = ("baker", "clock maker", "ship's doctor", "teacher", "map printer", "gardener", "glass blower", "surveyor")
SAMPLE_SIZES = {"train": 48, "dev": 16}


def sample_articles(part: Literal["train", "dev"]) -> list[Article]:
    """Returns made-up lives of made-up people, with four questions each. Nobody is in both parts."""
    rng = torch.Generator().manual_seed(0)
    names = [f"{first} {last}" for last in FAMILIES for first in PEOPLE]
    order = torch.randperm(len(names), generator=rng).tolist()
    lives = [sample_life(names[index], rng) for index in order[: sum(SAMPLE_SIZES.values())]]
    return lives[: SAMPLE_SIZES["train"]] if part == "train" else lives[SAMPLE_SIZES["train"] :]


def sample_life(name: str, rng: torch.Generator) -> Article:
    """Returns one of them; in the texts answers stand between stars."""

    def two_of(words: Sequence[str]) -> list[str]:
        return [words[int(index)] for index in torch.randperm(len(words), generator=rng)[:2]]

    (home, town), (job, other) = two_of(PLACES), two_of(JOBS)
    year = 1700 + int(torch.randint(150, (), generator=rng))
    facts = [
        (f"{name} was born in *{home}* in {year}.", f"Where was {name} born?"),
        (f"The first work of {name} was that of a *{job}*.", f"What was the first work of {name}?"),
        (f"After {year + 20}, {name} moved to *{town}* and became a {other}.", f"Where did {name} move?"),
        (f"{name} died in {town} in *{year + 60}*.", f"When did {name} die?"),
    ]
    starred = " ".join(facts[index][0] for index in torch.randperm(len(facts), generator=rng).tolist())
    context = starred.replace("*", "")
    asked = []
    for number, (text, question) in enumerate(facts):
        before, answer, _ = text.split("*")
        start = context.index(text.replace("*", "")) + len(before)
        asked.append(Question(f"{name.lower().replace(' ', '-')}-{number}", question, context, (answer,), start))
    return Article(name, asked)
