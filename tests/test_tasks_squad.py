"""SQuAD: its files, windows and offsets, the official scores, predictions, and models that learn."""

import json
import lzma
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from tokenizers.processors import Sequence
from training import losses_of, random_bert

from lagwise.lab.checkpoint import load_latest
from lagwise.lab.config import Config, with_fields
from lagwise.lab.experiment import make_config
from lagwise.lab.loop import Session, Settings
from lagwise.lab.run import train
from lagwise.lab.tasks.base import SPLITS, Sampling
from lagwise.lab.tasks.text.qanet import Averaged, QANet
from lagwise.lab.tasks.text.questions import Question, divide_articles, read_articles, sample_articles
from lagwise.lab.tasks.text.spans import SpanMetric, best_spans, mask_scores
from lagwise.lab.tasks.text.squad import Squad

SMALL = {"dim": 32, "layers": 1, "heads": 2, "batch": 16, "rate": 5e-3, "dropout": 0.0}
SHORT = {"length": 64, "stride": 16, "question": 16, "vocabulary": 300}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keeps what the tests make away from the user's own cache."""
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config_of(**fields):
    return with_fields(Config("squad"), {**SMALL, "encoding": "t5", **fields})


def question(key, text, context, *answers, nth=0):
    """Returns a question of the official format, whose answers are found in the context, the first one at its n-th place."""
    starts = [index for index in range(len(context)) if context.startswith(answers[0], index)]
    found = [{"text": answers[0], "answer_start": starts[nth]}]
    found += [{"text": answer, "answer_start": context.index(answer)} for answer in answers[1:]]
    return {"id": key, "question": text, "answers": found}


BRIDGE = "The bridge over the Ilm, built in 1874, fell in 1901; a second bridge over the Ilm was built in 1903."
UNICODE = "Señor Müller ate naïve crème brûlée 🍮 in Łódź — the crème was free. 東京 came later, and İstanbul too."
FILE = {
    "version": "1.1",
    "data": [
        {
            "title": "Bridge",
            "paragraphs": [
                {
                    "context": BRIDGE,
                    "qas": [
                        question("b1", "What did the second bridge cross?", BRIDGE, "the Ilm", "Ilm", nth=1),
                        question("b2", "When did the first fall?", BRIDGE, "1901"),
                    ],
                }
            ],
        },
        {
            "title": "Dessert",
            "paragraphs": [
                {
                    "context": UNICODE,
                    "qas": [
                        question("d1", "Where?", UNICODE, "Łódź"),
                        question("d2", "What was free?", UNICODE, "the crème"),
                        question("d3", "Which city came later?", UNICODE, "東京"),
                        question("d4", "What was eaten?", UNICODE, "naïve crème brûlée 🍮"),
                        question("d5", "And?", UNICODE, "İstanbul"),
                    ],
                }
            ],
        },
    ],
}


@pytest.fixture
def folder(tmp_path):
    """Returns a folder in the official layout."""
    path = tmp_path / "data"
    path.mkdir()
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        (path / name).write_text(json.dumps(FILE))
    return path


def whole(examples):
    return examples.batch(range(len(examples)))


def oracle(batch):
    """Returns scores that choose the labelled answers, and nothing in windows without one."""
    scores = torch.zeros(*batch["tokens"].shape, 2)
    rows = (batch["start"] > 0).nonzero()[:, 0]
    scores[rows, batch["start"][rows], 0] = 9.0
    scores[rows, batch["end"][rows], 1] = 9.0
    return scores


def answers_of(task, split="test", longest=None):
    """Returns the answers that the labels give, by key."""
    metric, batch = SpanMetric(task.asked, "f1"), whole(task.examples(split, longest))
    metric.update(*task.answers(oracle(batch), batch))
    return metric.predictions()


@pytest.mark.parametrize("tokenizer", ["", "words"])
def test_offsets_give_the_text_of_answers_that_repeat_and_have_any_letters(folder, tokenizer):
    task = Squad(folder, tokenizer=tokenizer, **SHORT)
    examples = task.examples("test")
    wanted = {each.key: each.answers[0] for each in task.asked}
    assert len(wanted) == 7 and answers_of(task) == wanted
    batch = whole(examples)
    row = int((batch["question"] == [each.key for each in task.asked].index("b1")).nonzero()[0])
    # The second "the Ilm", not the first.
    assert batch["chars"][row, batch["start"][row], 0] == BRIDGE.rindex("the Ilm")


def test_an_answer_inside_a_word_is_counted_and_not_trained_on(folder):
    content = json.loads(json.dumps(FILE))
    content["data"][0]["paragraphs"][0]["qas"][1]["answers"] = [{"text": "ridge", "answer_start": BRIDGE.index("ridge")}]
    content["data"][1]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 6
    (folder / "train-v1.1.json").write_text(json.dumps(content))
    task = Squad(folder, tokenizer="words", **SHORT)
    with pytest.warns(UserWarning, match="2 of 7 first answers of train are not the text of whole tokens"):
        examples = task.examples("train")
    trained = {task.asked[number].key for number in whole(examples)["question"].tolist()}
    assert trained == {"b1", "d2", "d3", "d4", "d5"}


def test_windows_step_by_the_stride_and_hold_every_token(folder):
    task = Squad(folder, tokenizer="words", length=24, stride=5, question=16)
    batch = whole(task.examples("test"))
    number = [each.key for each in task.asked].index("b1")
    rows = (batch["question"] == number).nonzero()[:, 0].tolist()
    tokens, _, _ = task.tokens_of["dev"].contexts[number].unbind(1)
    asked = len(task.tokens_of["dev"].questions[number])
    room = 24 - 3 - asked
    assert len(rows) == 1 + -(-(len(tokens) - room) // 5) > 2
    for place, row in enumerate(rows):
        first, last = int(batch["first"][row]), int(batch["last"][row])
        assert first == asked + 2 and batch["lengths"][row] == last + 1 <= 24
        assert batch["tokens"][row, first:last].tolist() == tokens[5 * place : 5 * place + room].tolist()
        chars = batch["chars"][row, first:last].tolist()
        assert [BRIDGE[start:end].lower() for start, end in chars] == [
            task.tokenizer.id_to_token(token) for token in batch["tokens"][row, first:last].tolist()
        ]
    # The answer is labelled in all windows that hold it as a whole; the others point to the first token.
    start, end = task.tokens_of["dev"].spans[number]
    held = [5 * place <= start and end < 5 * place + room for place in range(len(rows))]
    assert [bool(batch["start"][row] > 0) for row in rows] == held and True in held and False in held
    assert all(task.tokenizer.id_to_token(int(batch["tokens"][row, 0])) == "[CLS]" for row in rows)
    assert answers_of(task)["b1"] == "the Ilm"


def test_other_lengths_give_other_windows_and_the_same_answers(folder):
    task = Squad(folder, **{**SHORT, "stride": 8})
    long, short = task.examples("test", 200), task.examples("test", 28)
    assert len(long) == 7 < len(short) and task.examples("validation", 28) is short
    assert answers_of(task, longest=200) == answers_of(task, longest=28)
    with pytest.raises(ValueError, match=r"length must be at least 27, .* but is 20: choose a smaller stride"):
        task.examples("test", 20)


def test_the_best_span_is_that_of_all_pairs():
    torch.manual_seed(0)
    scores, longest = torch.randn(5, 12, 2), 4
    allowed = torch.rand(5, 12) < 0.6
    allowed[4] = False
    found = best_spans(mask_scores(scores, allowed), longest)
    for row in range(5):
        pairs = {
            (first, last): float(scores[row, first, 0] + scores[row, last, 1])
            for first in range(12)
            for last in range(first, min(12, first + longest))
            if allowed[row, first] and allowed[row, last]
        }
        if not pairs:
            assert row == 4 and found[0][row] == -torch.inf
            continue
        best = max(pairs, key=pairs.__getitem__)
        assert (int(found[1][row]), int(found[2][row])) == best and found[0][row] == pytest.approx(pairs[best])


def asked(*answers, context="one two three four five", key="q"):
    return Question(key, "?", context, answers, 0)


def scores(text, *answers):
    """Returns EM and F1 of one answer that is the whole context."""
    questions = [asked(*answers, context=text)]
    found = []
    for part in ("exact_match", "f1"):
        metric = SpanMetric(questions, part)
        metric.update(torch.tensor([[1.0, 0.0, len(text)]]), torch.tensor([0]))
        found.append(float(metric.compute()))
    return found


@pytest.mark.parametrize(
    ("text", "answers", "em", "f1"),
    [
        ("The Denver Broncos", ["Denver Broncos"], 100, 100),
        ("a cat, an owl and the dog", ["cat owl and dog"], 100, 100),
        ("Levi's Stadium.", ["levis stadium"], 100, 100),
        ("U.S.", ["us"], 100, 100),
        ("  two   words ", ["two words"], 100, 100),
        ("theatre", ["atre"], 0, 0),
        ("1976", ["1976-77"], 0, 0),
        # Two of three words are right, and all two of the answer's are there: F1 = 2 * 2/3 * 1 / (2/3 + 1).
        ("old Denver Broncos", ["Denver Broncos"], 0, 80),
        # The better of the answers counts: 1/2 and 1 give 2/3; 1/2 and 1/3 give 2/5.
        ("Santa Clara", ["Clara", "San Francisco Clara"], 0, 200 / 3),
        ("Santa Clara", ["Levi's Stadium", "in Santa Clara, California", "Santa Clara"], 100, 100),
        # Words count as often as both have them: 2 of 3, and 2 of 2.
        ("no no no", ["no no"], 0, 80),
        ("", ["something"], 0, 0),
        # Nothing but an article and nothing at all are the same.
        ("the", ["a"], 100, 100),
    ],
)
def test_scores_are_those_of_the_official_rules(text, answers, em, f1):
    assert scores(text, *answers) == [pytest.approx(em), pytest.approx(f1, rel=1e-5)]


def test_the_best_window_of_a_question_counts_and_one_without_a_span_is_empty():
    questions = [asked("two", key="a"), asked("four", key="b"), asked("five", key="c"), asked("one", key="d")]
    metric = SpanMetric(questions, "exact_match")
    lowest = -torch.inf
    metric.update(torch.tensor([[1.0, 0, 3], [lowest, 5, 9], [2.0, 0, 3]]), torch.tensor([0, 1, 2]))
    metric.update(torch.tensor([[3.0, 4, 7], [lowest, 0, 0], [1.0, 19, 23]]), torch.tensor([0, 1, 2]))
    assert metric.predictions() == {"a": "two", "b": "", "c": "one"}
    # The fourth was never asked.
    assert float(metric.compute()) == pytest.approx(100 / 3)


def test_processes_put_their_spans_together():
    questions = [asked("two", key="a"), asked("four", key="b")]
    parts = [SpanMetric(questions, "exact_match") for _ in range(3)]
    parts[0].update(torch.tensor([[1.0, 0, 3]]), torch.tensor([0]))
    parts[1].update(torch.tensor([[3.0, 4, 7], [2.0, 14, 18]]), torch.tensor([0, 1]))
    # The third has seen nothing, which torchmetrics turns into an empty tensor.
    for name in ("spans", "numbers"):
        own = [getattr(part, name) or [torch.tensor([], dtype=part.dtype)] for part in parts]
        assert {(x.dtype, x.ndim) for states in own for x in states} == {(parts[0].dtype, 1)}
        gathered = [torch.cat(states) for states in own]
        setattr(parts[0], name, torch.cat(gathered))
    assert parts[0].predictions() == {"a": "two", "b": "four"}


def test_files_may_be_compressed(folder):
    (folder / "dev-v1.1.json").rename(folder / "plain")
    (folder / "dev-v1.1.json.xz").write_bytes(lzma.compress((folder / "plain").read_bytes()))
    assert read_articles(folder, "dev-v1.1.json") == read_articles(folder, "train-v1.1.json")
    (folder / "dev-v1.1.json.xz").write_bytes(lzma.compress(b"{}" * 500)[:-20])
    with pytest.raises(ValueError, match=r"dev-v1.1.json.xz must be a whole compressed file, but cannot be read"):
        read_articles(folder, "dev-v1.1.json")


def damaged(change):
    content = json.loads(json.dumps(FILE))
    change(content)
    return json.dumps(content)


QUESTION = "data[0].paragraphs[0].qas[1]"


def first_question(content):
    return content["data"][0]["paragraphs"][0]["qas"][1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n"version": "1.1",\n"data": [}', "train-v1.1.json, line 3: "),
        ("[]", "train-v1.1.json: data is missing, but expected is a list"),
        ('{"data": []}', "data is empty, but expected is one entry at least"),
        (damaged(lambda x: x["data"][1].pop("title")), "data[1]: title is missing, but expected is a text"),
        (
            damaged(lambda x: x["data"][0]["paragraphs"][0].update(context=3)),
            "data[0].paragraphs[0]: context is 3, but expected is",
        ),
        (damaged(lambda x: first_question(x).update(answers=[])), f"{QUESTION}: answers is empty"),
        (damaged(lambda x: first_question(x).pop("id")), f"{QUESTION}: id is missing"),
        (
            damaged(lambda x: first_question(x)["answers"][0].update(answer_start="5")),
            f"{QUESTION}.answers[0]: answer_start is '5', but expected is a whole number",
        ),
        (
            damaged(lambda x: first_question(x)["answers"][0].update(answer_start=len(BRIDGE) - 3)),
            f"{QUESTION}.answers[0]: answer_start is {len(BRIDGE) - 3}, but expected is a place in the context",
        ),
        (damaged(lambda x: first_question(x).update(id="b1")), "the id 'b1' is there twice"),
    ],
)
def test_malformed_files_say_where_and_what(folder, text, message):
    (folder / "train-v1.1.json").write_text(text)
    with pytest.raises(ValueError) as raised:
        Squad(folder).examples("train")
    assert message in str(raised.value)


def test_a_missing_file_is_named(folder):
    (folder / "train-v1.1.json").unlink()
    with pytest.raises(ValueError, match=r"data must be a folder with train-v1\.1\.json.*split_articles"):
        Squad(folder).examples("train")


def test_the_hub_has_the_same_questions(folder, monkeypatch):
    rows = [
        {
            "id": each.key, "title": article.title, "context": each.context, "question": each.text,
            "answers": {"text": list(each.answers), "answer_start": [each.start] * len(each.answers)},
        }
        for article in read_articles(folder, "train-v1.1.json")
        for each in article.questions
    ]  # fmt: skip
    called = []

    def load_dataset(name, split):
        called.append((name, split))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert Squad("hub").articles == Squad(folder).articles
    assert called == [("rajpurkar/squad", "train"), ("rajpurkar/squad", "validation")]


def test_articles_are_divided_by_title_and_seed(folder):
    articles = sample_articles("train")
    parts = divide_articles(articles, 0.75, "share", salt="0 ")
    other = divide_articles(articles, 0.75, "share", salt="1 ")
    assert parts == divide_articles(articles[::-1], 0.75, "share", salt="0 ") != other
    train, dev = ([article.title for article in found] for found in parts)
    assert len(train) == 36 and dev == sorted(dev) and not set(train) & set(dev) and len(set(train) | set(dev)) == 48
    (folder / "train-v1.1.json").unlink()
    task = Squad(folder, split_articles=0.5, **SHORT)
    assert {part: len(found) for part, found in task.articles.items()} == {"train": 1, "dev": 1}
    with pytest.raises(ValueError, match=r"split_articles must leave an article on both sides of 2, but is 0\.1"):
        assert Squad(folder, split_articles=0.1).articles


def test_validation_may_have_articles_of_its_own():
    task, other = Squad(validation_articles=0.25, **SHORT), Squad(**SHORT)
    titles = {part: {article.title for article in found} for part, found in task.articles.items()}
    assert {part: len(found) for part, found in titles.items()} == {"train": 36, "validation": 12, "dev": 16}
    assert len(set().union(*titles.values())) == 64 and task.articles["dev"] == other.articles["dev"]
    asked = {split: {task.asked[number].key for number in task.examples(split).columns["question"].tolist()} for split in SPLITS}
    assert [len(asked[split]) for split in SPLITS] == [4 * 36, 4 * 12, 4 * 16] and len(set().union(*asked.values())) == 4 * 64
    assert other.examples("validation") is other.examples("test")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "bert"}, "model must be one of encoder, qanet, hf, but is 'bert'"),
        ({"model": "hf"}, "path must be the folder or name of a model with model='hf'"),
        ({"path": "somewhere"}, "but is 'somewhere' with model='encoder'"),
        ({"absolute": "lose"}, "absolute must be one of remove, keep, fade, but is 'lose'"),
        ({"absolute": "fade"}, "fade must be a number of steps with absolute='fade'"),
        ({"average": 1.0}, "average must be at least 0 and less than 1, but is 1.0"),
        ({"stride": 0}, "stride must be a whole number of at least 1"),
    ],
)
def test_wrong_options_say_what_to_do(options, message):
    with pytest.raises(ValueError) as raised:
        Squad(**options)
    assert message in str(raised.value)


def test_the_sample_is_fixed_and_answered_by_its_labels():
    task = Squad(**SHORT)
    assert task.is_sample and sample_articles("train") == sample_articles("train")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = [len(task.examples(split)) for split in SPLITS]
    assert counts[0] >= 192 and counts[1] == counts[2] >= 64
    wanted = {each.key: each.answers[0] for article in task.articles["dev"] for each in article.questions}
    assert answers_of(task) == wanted
    people = [{article.title for article in sample_articles(part)} for part in ("train", "dev")]
    assert not people[0] & people[1]


def test_a_trained_tokenizer_is_stored_and_the_same_each_time(cache, monkeypatch):
    first = Squad(**SHORT).tokenizer.to_str()
    stored = list(cache.rglob("*.json"))
    assert len(stored) == 1 and Squad(**SHORT).tokenizer.to_str() == first
    stored[0].unlink()
    assert Squad(**SHORT).tokenizer.to_str() == first
    assert Squad(**{**SHORT, "vocabulary": 200}).tokenizer.get_vocab_size() == 200


def test_a_tokenizer_in_the_data_folder_is_taken(folder):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "il", "##m", "b", "##ridge", "over"]
    (folder / "vocab.txt").write_text("\n".join(words))
    task = Squad(folder)
    assert task.tokenizer.encode("The BRIDGE over the Ilm").tokens[1:-1] == ["the", "b", "##ridge", "over", "the", "il", "##m"]
    assert task.frame == ([2], [3], [3])
    task.tokenizer.enable_truncation(5)
    task.tokenizer.save(str(folder / "tokenizer.json"))
    assert len(Squad(folder).tokenizer.encode("the bridge over the Ilm")) == 9
    # A tokenizer of language modelling puts special tokens nowhere.
    task.tokenizer.post_processor = Sequence([])
    task.tokenizer.save(str(folder / "tokenizer.json"))
    assert Squad(folder).frame == ([2], [3], [3])
    (folder / "vocab.txt").write_text("the\n")
    with pytest.raises(ValueError, match=r"vocab.txt must have a line for each token, but \[UNK\] is missing"):
        assert Squad(tokenizer=str(folder / "vocab.txt")).tokenizer


@pytest.mark.parametrize(
    "options", [{}, {"tokenizer": "words"}, {"model": "qanet", "tokenizer": "words"}, {"model": "qanet", "average": 0.9}]
)
def test_thirty_steps_lower_the_loss_of_the_sample(options):
    losses = losses_of(Squad(**SHORT, **options), config_of(), 30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("model", ["encoder", "qanet"])
def test_padding_and_other_rows_change_no_score(model):
    task = Squad(model=model, **SHORT)
    torch.manual_seed(0)
    net, examples = task.model(config_of()).eval(), task.examples("test")
    lengths = examples.sizes.tolist()
    shortest = lengths.index(min(lengths))
    alone, batch = examples.batch([shortest]), examples.batch([shortest, lengths.index(max(lengths))])
    first, last = int(alone["first"]), int(alone["last"])
    torch.testing.assert_close(net(batch)[0, first:last], net(alone)[0, first:last])


def test_the_five_encoders_of_qanet_share_slopes_and_nothing_else():
    task = Squad(model="qanet", **SHORT)
    config = config_of(encoding="at5", layers=2, encoding_options=task.encoding_options("at5"))
    model = task.model(config)
    assert isinstance(model, QANet) and [encoder.depth for encoder in model.encoders] == [1, 1, 2, 2, 2]
    encodings = [encoder.encoding for encoder in model.encoders]
    assert all(encoding.slope is encodings[0].slope for encoding in encodings)
    assert len({id(encoding.readout) for encoding in encodings}) == 5
    assert encodings[0].slope.min() >= 5.0 and encodings[0].slope.max() <= 15.0 and encodings[0].reach == 400


def test_without_positions_qanet_does_not_know_the_order_of_words():
    task = Squad(model="qanet", **SHORT)
    torch.manual_seed(0)
    batch = task.examples("test").batch([0])
    first, last = int(batch["first"]), int(batch["last"])
    order = torch.arange(batch["tokens"].shape[1])
    order[first:last] = order[first:last].flip(0)
    moved = {**batch, "tokens": batch["tokens"][:, order]}
    for encoding, same in (("none", True), ("rotary", False)):
        net = task.model(config_of(encoding=encoding)).eval()
        assert torch.allclose(net(moved)[:, order], net(batch), atol=1e-5) == same


def test_averages_follow_the_weights():
    layer = torch.nn.Linear(1, 1, bias=False)
    model = Averaged(layer, 0.5)
    torch.nn.init.zeros_(layer.weight)
    model.averages.get_buffer("weight").zero_()
    expected = 0.0
    for step, weight in enumerate((1.0, 2.0, 4.0)):
        torch.nn.init.constant_(layer.weight, weight)
        assert model.train()(torch.ones(1, 1)) == weight
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * weight
    assert float(model.eval()(torch.ones(1, 1))) == pytest.approx(expected)
    assert layer.weight == 4.0 and not any(x.requires_grad for x in model.averages.buffers())


@pytest.fixture
def tiny_bert(tmp_path):
    """Returns a folder with a random BERT and its tokenizer."""
    return random_bert(tmp_path / "bert", Squad(**SHORT).tokenizer)


def test_a_converted_model_learns(tiny_bert):
    task = Squad(model="hf", path=str(tiny_bert), **SHORT)
    losses = losses_of(task, config_of(encoding="shaw", per_layer=True, encoding_options={"max_lag": 8}), 30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_a_converted_model_has_the_configs_encoding_and_dropout(tiny_bert):
    kept = Squad(model="hf", path=str(tiny_bert), absolute="keep", **SHORT)
    batch, found = kept.examples("test").batch([0, 1, 2]), {}
    for encoding in ("none", "t5", "alibi"):
        torch.manual_seed(0)
        model = kept.model(config_of(encoding=encoding, dropout=0.25, attention_dropout=0.125))
        assert model.inner.config.hidden_dropout_prob == 0.25 and model.inner.config.attention_probs_dropout_prob == 0.125
        assert hasattr(model.inner.config, "lagwise") == (encoding != "none")
        found[encoding] = model.eval()(batch)[0, : batch["lengths"][0]]
    # T5 starts where it changes nothing.
    torch.testing.assert_close(found["t5"], found["none"], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found["alibi"], found["none"], atol=1e-5)
    removed = Squad(model="hf", path=str(tiny_bert), **SHORT)
    model = removed.model(config_of(encoding="t5", encoding_options={"buckets": 8, "max_lag": 20}))
    assert model.inner.config.lagwise["options"] == {"buckets": 8, "max_lag": 20}
    longer = {"tokens": batch["tokens"].repeat(1, 2), "lengths": 2 * batch["lengths"], "first": batch["first"]}
    assert longer["tokens"].shape[1] > 64 and model(longer).isfinite().all()
    with pytest.raises(ValueError, match="at most 64 tokens"):
        kept.model(config_of(encoding="t5"))(longer)


@pytest.mark.parametrize("absolute", ["remove", "keep"])
def test_learned_positions_of_a_hugging_face_model_are_its_own(tiny_bert, absolute):
    found = []
    for encoding, own in (("learned", absolute), ("none", "keep")):
        task = Squad(model="hf", path=str(tiny_bert), absolute=own, **SHORT)
        torch.manual_seed(0)
        model = task.model(config_of(encoding=encoding, encoding_options=task.encoding_options(encoding)))
        assert not hasattr(model.inner.config, "lagwise")
        found.append(model.eval()(task.examples("test").batch([0, 1])))
    assert torch.equal(*found)
    with pytest.raises(ValueError, match="length must be at most 64, where the model's own positions end, but is 65"):
        task.model(config_of(encoding="learned", encoding_options={"length": 65}))
    linear = task.model(config_of(encoding="learned", attention="linear", feature_map="relu"))
    assert linear.inner.config.lagwise["absolute"] == "keep" and linear.inner.config.lagwise["encoding"] == "none"


def test_models_of_hugging_face_that_do_not_fit_are_refused(tiny_bert, tmp_path):
    with pytest.raises(ValueError, match="path must be the folder or the name of a Hugging Face model, but is"):
        Squad(model="hf", path=str(tmp_path / "nowhere"), tokenizer=str(tiny_bert)).model(config_of())
    (tmp_path / "vocab.txt").write_text("\n".join(["[UNK]", "[CLS]", "[SEP]", *(f"word{number}" for number in range(397))]))
    with pytest.raises(ValueError, match="tokenizer must be the model's, which has 300 tokens, but it has 400"):
        Squad(model="hf", path=str(tiny_bert), tokenizer=str(tmp_path / "vocab.txt")).model(config_of())
    with pytest.raises(ValueError, match="start must be left out with model='qanet'"):
        Squad(model="qanet").model(config_of(start="runs/lm"))


def fields(**more):
    short = {f"task.{name}": value for name, value in SHORT.items()}
    return {**SMALL, **short, "steps": 4, "warmup": 0, "evaluate_every": 2, **more}


@pytest.mark.parametrize("model", ["encoder", "qanet", "hf"])
def test_a_run_trains_goes_on_and_writes_predictions_in_the_official_format(tmp_path, tiny_bert, model):
    own = {"encoder": {}, "qanet": {"task.average": 0.5}, "hf": {"task.path": str(tiny_bert)}}[model]
    config = make_config("squad", "at5", **fields(**{"task.model": model, **own}))
    settings = Settings(device="cpu", report_every=1, save_every=2)
    result = train(config, tmp_path / "run", settings)
    assert set(result["test"]) == {"loss", "f1", "em"} and 0.0 <= result["test"]["em"] <= result["test"]["f1"] <= 100.0
    assert result["test"] == result["validation"] and result["sample"]
    again = train(config, tmp_path / "run", settings, resume=True)
    assert again["test"] == result["test"]
    session = Session(config, settings)
    (file,) = session.task.generate(session.model.eval(), None, Sampling(), tmp_path / "out")
    predictions, articles = json.loads(file.read_text()), json.loads((tmp_path / "run" / "articles.json").read_text())
    asked = [each for article in sample_articles("dev") for each in article.questions]
    assert set(predictions) == {each.key for each in asked} and file.name == "predictions.json"
    assert all(predictions[each.key] and predictions[each.key] in each.context for each in asked)
    assert articles == {part: [article.title for article in sample_articles(part)] for part in ("train", "dev")}
    with pytest.raises(ValueError, match="prompt must be one of train, validation, test, or left out"):
        session.task.generate(session.model, "dev", Sampling(), tmp_path / "out")


def test_an_encoder_starts_from_another_run(tmp_path):
    train(make_config("squad", "t5", **fields()), tmp_path / "first", Settings(device="cpu"))
    first = load_latest(tmp_path / "first" / "checkpoints").tensors["model"]
    config = make_config("squad", "t5", **fields(seed=5, start=str(tmp_path / "first")))
    model = Session(config, Settings(device="cpu")).model.state_dict()
    assert (tmp_path / "first" / "tokenizer.json").is_file()
    taken = {name for name, x in model.items() if torch.equal(x, first[name])}
    assert taken == {name for name in model if name.startswith(("embedding.", "encoder."))}


@pytest.mark.parametrize("preset", ["paper1-qanet", "paper2-base"])
def test_presets_are_the_papers(preset):
    config = make_config("squad", preset=preset)
    if preset == "paper1-qanet":
        sizes = (config.dim, config.heads, config.batch, config.rate, config.clip, config.beta1, config.dropout)
        assert sizes == (128, 8, 32, 1e-3, 5.0, 0.8, 0.1)
        assert config.task_options["question"] == 50 and config.task_options["length"] == 400 + 50 + 3
        assert config.task_options["average"] == 0.9999 and config.weight_decay == 3e-7
        assert make_config("squad", "at5", preset=preset).encoding_options["slopes"] == [5.0, 15.0]
    else:
        assert (config.encoding, config.rate, config.batch, config.schedule) == ("huang4", 3e-5, 48, "linear")
        assert (config.task_options["length"], config.task_options["stride"]) == (512, 128)
        assert round(config.steps * config.batch / 87_599, 1) == 2.0


def test_learned_positions_reach_to_the_end_of_a_window():
    assert Squad(length=100).encoding_options("learned") == {"length": 100} and Squad().encoding_options("t5") == {}
