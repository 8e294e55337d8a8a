"""Translation: parallel text, buckets of tokens, label smoothing, beam search, BLEU, and the command line."""

import gzip
import math
from itertools import product
from types import SimpleNamespace

import pytest
import sacrebleu
import torch
from training import losses_of
from typer.testing import CliRunner

from lagwise.lab.cli import app
from lagwise.lab.config import Config, with_fields
from lagwise.lab.experiment import make_config
from lagwise.lab.loop import Session, Settings
from lagwise.lab.run import train
from lagwise.lab.tasks.base import SPLITS, Sampling
from lagwise.lab.tasks.text.beam import BeamOptions, beam_search
from lagwise.lab.tasks.text.bleu import Bleu, MeasuredTranslations
from lagwise.lab.tasks.text.parallel_texts import sample_parallel
from lagwise.lab.tasks.text.translation import Translate
from lagwise.lab.tasks.text.translator import Decoding

SMALL = {"dim": 16, "layers": 1, "heads": 2, "batch": 1, "rate": 1e-2, "encoding": "t5"}
TINY = {"vocabulary": 300, "length": 24, "tokens": 96}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lagwise.lab.tasks.text.parallel_texts.SAMPLE_SIZES", {"train": 64, "validation": 6, "test": 6})


def config_of(**fields):
    return with_fields(Config("translation"), {**SMALL, **fields})


def model_of(task, **fields):
    torch.manual_seed(0)
    return task.model(config_of(**fields)).eval()


def write_json(folder, **texts):
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text, encoding="utf-8")


def parallel_files(folder):
    for name in ("train", "valid", "test"):
        write_json(folder, **{f"{name}_en": "one house\ntwo old houses\n", f"{name}_de": "ein Haus\nzwei alte Häuser\n"})


# Texts


def test_two_files_a_sentence_a_line(tmp_path):
    parallel_files(tmp_path)
    (tmp_path / "test.de").unlink()
    (tmp_path / "test.de.gz").write_bytes(gzip.compress("ein\u2028Haus\r\nzwei".encode()))
    task = Translate(tmp_path)
    assert task.texts("train") == (["one house", "two old houses"], ["ein Haus", "zwei alte Häuser"])
    assert task.texts("test").target == ["ein\u2028Haus", "zwei"]
    other = Translate(tmp_path, source="de", target="en")
    assert other.texts("validation").target == ["one house", "two old houses"]


def test_numbers_of_lines_must_be_equal(tmp_path):
    parallel_files(tmp_path)
    write_json(tmp_path, valid_de="ein Haus\n")
    with pytest.raises(
        ValueError, match=r"valid\.de, line 2: is missing, as the file has 1 lines and .*valid\.en 2, but expected"
    ):
        Translate(tmp_path).texts("validation")


def test_missing_files_and_wrong_bytes_are_told(tmp_path):
    parallel_files(tmp_path)
    with pytest.raises(ValueError, match=r"data must be a folder with train\.fr"):
        Translate(tmp_path, target="fr").texts("train")
    (tmp_path / "train.de").write_bytes(b"ein Haus\nzwei H\xe4user\n")
    with pytest.raises(ValueError, match=r"train\.de, line 2: byte 0xe4 is no UTF-8"):
        Translate(tmp_path).texts("train")


def test_empty_lines_are_left_out_with_a_count(tmp_path):
    write_json(tmp_path, train_en="a\n\nc\nd\n", train_de="A\nB\n \nD\n", test_en="\n", test_de="x\n")
    with pytest.warns(UserWarning, match="2 of 4 pairs of train have an empty side"):
        assert Translate(tmp_path).texts("train") == (["a", "d"], ["A", "D"])
    with pytest.raises(ValueError, match="data must have sentences for test, but all 1 pairs"):
        Translate(tmp_path).texts("test")


def test_long_pairs_are_left_out_of_training_and_cut_in_evaluation(tmp_path):
    parallel_files(tmp_path)
    # Without merges each token is a byte, and the end one more.
    with pytest.warns(UserWarning, match="1 of 2 pairs of train have more than 12 tokens and are left out"):
        examples = Translate(tmp_path, vocabulary=261, length=12).examples("train")
    assert examples.batch(range(len(examples)))["numbers"].tolist() == [[0, 0]]
    task = Translate(tmp_path, vocabulary=261, length=12)
    with pytest.warns(UserWarning, match="1 of 2 pairs of test have more than 12 tokens and are cut"):
        batch = task.examples("test").batch([0])
    assert batch["tokens"].shape == (2, 12) and sorted(batch["lengths"].tolist()) == [10, 12]
    # At another length, nothing is cut; nothing is said twice.
    assert sorted(task.examples("test", 20).batch([0])["lengths"].tolist()) == [10, 15]
    assert task.examples("test") is task.examples("test")
    with pytest.raises(ValueError, match="length must leave some pairs of train, but all of 2"), pytest.warns(UserWarning):
        Translate(tmp_path, vocabulary=261, length=5).examples("train")


def test_the_hub(monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return {"translation": [{"de": "ein Haus", "en": "one house"}]}

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert Translate("hub").texts("validation") == (["one house"], ["ein Haus"])
    assert asked == [("wmt/wmt17", "de-en", "validation")]
    with pytest.raises(ValueError, match="source or target must be 'en'"):
        Translate("hub", source="fr").texts("train")


def test_the_sample_is_backwards_in_other_words_and_always_the_same():
    words = {}
    for source, target in zip(*sample_parallel("train"), strict=True):
        for one, other in zip(source.split(), reversed(target.split()), strict=True):
            assert words.setdefault(one, other) == other
    assert len(set(words.values())) == len(words) > 20
    assert sample_parallel("train") == sample_parallel("train") and sample_parallel("validation") != sample_parallel("test")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "de"}, "target must be another language"),
        ({"tokens": 10}, "tokens must be at least length=256"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and less than 1"),
        ({"beam": 0}, "beam must be"),
        ({"length_penalty": -1.0}, "length_penalty must be at least 0"),
        ({"words": "spaces"}, "words must be one of 13a"),
        ({"beams": 3}, "'beams' is no option"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(ValueError, match=words):
        Translate(**options)


# Batches


def test_buckets_hold_each_pair_once_and_few_enough_tokens():
    task = Translate(**TINY)
    examples = task.examples("train")
    assert len(examples) > 3
    numbers = torch.cat([examples.batch([index])["numbers"] for index in range(len(examples))])
    assert sorted(numbers[:, 1].tolist()) == list(range(64)) and set(numbers[:, 0].tolist()) == {0}
    for index in range(len(examples)):
        batch = examples.batch([index])
        assert max(batch["tokens"].numel(), batch["inputs"].numel()) <= 96
    padding = sum(examples.batch([index])["tokens"].numel() for index in range(len(examples)))
    assert padding < 1.3 * sum(int(examples.batch([index])["lengths"].sum()) for index in range(len(examples)))


def test_buckets_depend_on_the_seed_in_training_alone():
    def groups(split, seed):
        return [group.tolist() for group in Translate(seed=seed, **TINY).examples(split).groups]

    assert groups("train", 0) == groups("train", 0) != groups("train", 1)
    assert groups("test", 0) == groups("test", 1)


def test_a_batch_tells_what_comes_next():
    task = Translate(**TINY)
    batch = task.examples("validation").batch([0])
    texts, end = task.texts("validation"), task.end
    at = 0
    for row, (split, number) in enumerate(batch["numbers"].tolist()):
        assert SPLITS[split] == "validation"
        source = task.tokenizer.encode(texts.source[number]).ids
        target = task.tokenizer.encode(texts.target[number]).ids
        assert batch["tokens"][row].tolist()[: len(source) + 1] == [*source, end] and batch["lengths"][row] == len(source) + 1
        assert batch["inputs"][row].tolist()[: len(target) + 1] == [end, *target]
        assert batch["targets"][at : at + len(target) + 1].tolist() == [*target, end]
        assert batch["limits"][row] == min(len(source) + 1 + task.options.longer, 24)
        at += len(target) + 1
    assert at == len(batch["targets"]) and task.tokens(batch) == at + int(batch["lengths"].sum())


def test_the_loss_does_not_depend_on_the_batch():
    task = Translate(**TINY)
    model, examples = model_of(task), task.examples("train")
    together = task.loss(model(batch := examples.batch([0, 1])), batch)
    apart = [task.loss(model(batch := examples.batch([index])), batch) for index in (0, 1)]
    assert together[0].item() == pytest.approx(sum(total.item() for total, _ in apart), rel=1e-5)
    assert together[1].item() == sum(count.item() for _, count in apart)


def test_label_smoothing_by_hand():
    task = Translate(label_smoothing=0.3)
    # Shares 1/2, 1/4, 1/4: the right token has 0.7 + 0.1 of the target, the others 0.1 each.
    outputs, batch = torch.tensor([[0.5, 0.25, 0.25]]).log(), {"targets": torch.tensor([0])}
    total, count = task.loss(outputs, batch)
    assert total.item() == pytest.approx(0.8 * math.log(2) + 2 * 0.1 * math.log(4), rel=1e-6) and count == 1
    plain, _ = Translate(label_smoothing=0.0).loss(outputs, batch)
    assert plain.item() == pytest.approx(math.log(2), rel=1e-6)


# Beam search, on a toy whose next token depends on the two before, and on the sentence

END, SYMBOLS = 2, 4


class Toy:
    """A step of beam search, which remembers its hypotheses as a cache does."""

    def __init__(self, sentences, seed=0):
        self.tables = torch.randn(sentences, SYMBOLS, SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(seed)) * 2
        self.rows, self.before = torch.arange(sentences), torch.full((sentences,), END)

    def __call__(self, tokens, origins):
        rows, before = self.rows[origins], self.before[origins]
        self.rows, self.before = rows, tokens
        return self.tables[rows, before, tokens]

    def log_probability(self, sentence, tokens):
        path, total = [END, END, *tokens], 0.0
        for one, two, three in zip(path, path[1:], path[2:], strict=False):
            total += float(self.tables[sentence, one, two].log_softmax(0)[three])
        return total


def all_translations(limit):
    others = [symbol for symbol in range(SYMBOLS) if symbol != END]
    return [[*tokens, END] for size in range(limit) for tokens in product(others, repeat=size)]


def by_hand(toy, sentence, limit, search):
    """Beam search with lists, a hypothesis at a time."""
    alive, ended = [(0.0, [])], []
    for length in range(1, limit + 1):
        candidates = [
            (toy.log_probability(sentence, [*tokens, symbol]), [*tokens, symbol])
            for _, tokens in alive
            for symbol in range(SYMBOLS)
            if symbol == END or length < limit
        ]
        candidates.sort(reverse=True, key=lambda each: each[0])
        ended += [(total / search.penalty(length), tokens) for total, tokens in candidates[: search.beam] if tokens[-1] == END]
        alive = [each for each in candidates if each[1][-1] != END][: search.beam]
        if len(ended) >= search.beam:
            break
    return max(ended)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_wide_beam_finds_the_best_of_all_sequences(length_penalty):
    limits, search = [1, 3, 4, 4, 2, 4], BeamOptions(200, length_penalty)
    found = beam_search(Toy(6), torch.tensor(limits), start=END, end=END, search=search)
    for sentence, (limit, each) in enumerate(zip(limits, found, strict=True)):
        totals = {
            tuple(tokens): Toy(6).log_probability(sentence, tokens) / search.penalty(len(tokens))
            for tokens in all_translations(limit)
        }
        best = max(totals, key=lambda tokens: totals[tokens])
        assert (*each.tokens, END) == best and each.score == pytest.approx(totals[best], abs=1e-5)


@pytest.mark.parametrize("beam", [1, 2, 3])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_narrow_beams_are_those_of_a_plain_search(beam, length_penalty):
    search, limits = BeamOptions(beam, length_penalty), [6, 2, 6, 5, 6, 6, 6, 1]
    found = beam_search(Toy(8, seed=1), torch.tensor(limits), start=END, end=END, search=search)
    for sentence, (limit, each) in enumerate(zip(limits, found, strict=True)):
        score, tokens = by_hand(Toy(8, seed=1), sentence, limit, search)
        assert [*each.tokens, END] == tokens and each.score == pytest.approx(score, abs=1e-5)


def test_narrow_beams_may_miss_the_best():
    limits = torch.full((30,), 4)
    scores = [
        sum(each.score for each in beam_search(Toy(30), limits, start=END, end=END, search=BeamOptions(beam, 0.0)))
        for beam in (1, 2, 200)
    ]
    assert scores[0] < scores[1] < scores[2]


def greedy(model, batch, row):
    """The likeliest token each time, without a cache."""
    alone = {"tokens": batch["tokens"][row : row + 1, : batch["lengths"][row]], "lengths": batch["lengths"][row : row + 1]}
    tokens = [model.end]
    while len(tokens) < batch["limits"][row]:
        hidden = model.hidden({**alone, "inputs": torch.tensor([tokens])})
        tokens.append(int(model.scores(hidden[0, -1]).argmax()))
        if tokens[-1] == model.end:
            return tokens[1:-1]
    return tokens[1:]


def lively(task, **fields):
    """A model of random weights whose translations differ, and end now and then."""
    model = model_of(task, layers=2, **fields)
    model.choice = torch.nn.Linear(16, task.tokenizer.get_vocab_size())
    with torch.no_grad():
        model.choice.weight *= 8.0
        model.choice.bias[model.end] += 6.0
        for layer in model.decoder.layers:
            layer.cross.out.weight *= 8.0
            layer.attention.out.weight *= 8.0
    return model


@torch.no_grad()
def test_a_beam_of_one_is_greedy():
    task = Translate(**TINY)
    model, batch = lively(task), task.examples("test").batch([0])
    found = model(batch, BeamOptions(1, 0.6))
    assert [each.tokens for each in found] == [greedy(model, batch, row) for row in range(len(found))]
    sizes = {len(each.tokens) for each in found}
    assert len({tuple(each.tokens) for each in found}) > 3 and len(sizes) > 1 and max(sizes) > 3


class Uncached(Decoding):
    """The same without a cache: all tokens again at each step."""

    def __call__(self, tokens, origins):
        before = self.tokens[origins] if hasattr(self, "tokens") else tokens.new_empty(len(tokens), 0)
        self.tokens = torch.cat([before, tokens[:, None]], dim=1)
        self.context, self.lengths = self.context[origins], self.lengths[origins]
        x = self.model.embedding(self.tokens)
        return self.model.scores(self.model.decoder(x, self.context, context_lengths=self.lengths)[:, -1])


LINEAR = {"attention": "linear", "feature_map": "relu", "encoding": "sine-spe"}


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"encoding": "rotary"}, {"encoding": "sinusoidal"}, LINEAR], ids=str)
def test_beams_reorder_the_cache(fields):
    task = Translate(**TINY)
    model, batch = lively(task, **fields), task.examples("test").batch([0])
    search, ends = BeamOptions(3, 0.6), {"start": model.end, "end": model.end}
    with_cache, without = (
        beam_search(kind(model, batch), batch["limits"], search=search, **ends) for kind in (Decoding, Uncached)
    )
    assert [each.tokens for each in with_cache] == [each.tokens for each in without]
    assert [each.score for each in with_cache] == pytest.approx([each.score for each in without], abs=1e-4)


@torch.no_grad()
def test_the_score_is_that_of_teacher_forcing():
    task = Translate(**TINY)
    model, batch = lively(task), task.examples("test").batch([0])
    search = BeamOptions(3, 0.6)
    for row, each in enumerate(model(batch, search)):
        path = torch.tensor([[model.end, *each.tokens, model.end]])
        alone = {"tokens": batch["tokens"][row : row + 1], "lengths": batch["lengths"][row : row + 1], "inputs": path[:, :-1]}
        steps = model.scores(model.hidden(alone)[0]).log_softmax(-1).gather(1, path[0, 1:, None])
        assert each.score == pytest.approx(float(steps.sum()) / search.penalty(len(each.tokens) + 1), abs=1e-4)
        assert len(each.tokens) < batch["limits"][row]


# The model


def test_models_in_training_do_not_translate():
    task = Translate(**TINY)
    model, batch = model_of(task), task.examples("test").batch([0])
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        model.train()(batch, BeamOptions())


def test_encodings_are_separate_and_cross_attention_has_none():
    model = model_of(Translate(**TINY), layers=2)
    assert model.encoder.encoding is not model.decoder.encoding
    assert all(layer.cross.encoding is None for layer in model.decoder.layers)
    assert {name.split(".")[0] for name in model.state_dict()} == {"embedding", "encoder", "decoder"}


@pytest.mark.parametrize(("encoding", "count"), [("t5", 1), ("sinusoidal", 0)])
def test_first_only(encoding, count):
    model = model_of(Translate(first_only=True, **TINY), layers=2, encoding=encoding)
    for stack in (model.encoder, model.decoder):
        has = [sum(x.numel() for x in layer.attention.encoding.parameters()) > 0 for layer in stack.layers if count]
        assert has == [True, False][: 2 * count]


def test_presets_are_the_papers():
    config = make_config("translation", preset="paper")
    assert (config.dim, config.hidden, config.heads, config.layers, config.norm) == (512, 2048, 8, 6, "pre")
    assert config.rate == pytest.approx(512**-0.5 * 4000**-0.5) and config.schedule == "rsqrt" and config.beta2 == 0.98
    assert config.encoding_options == {"buckets": 64, "max_lag": 128}
    adaptive = make_config("translation", preset="paper-at5")
    assert adaptive.encoding == "at5" and adaptive.encoding_options["slopes"] == [1.0, 15.0]
    task = Translate(**{**TINY, "first_only": True})
    for each in (config, adaptive):
        small = with_fields(each, {"dim": 16, "hidden": 16, "layers": 2})
        torch.manual_seed(0)
        batch = task.examples("train").batch([0])
        assert task.loss(task.model(small)(batch), batch)[0].isfinite()


@pytest.mark.parametrize("fields", [{}, LINEAR], ids=str)
def test_thirty_steps_lower_the_loss(fields):
    losses = losses_of(Translate(**TINY), config_of(**fields), 30)
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


# Metrics


def test_bleu_is_that_of_sacrebleu():
    given = ["the cat sat on the mat .", "There is a house, and a tree", "", "one two three four five"]
    wanted = ["The cat sat on a mat .", "there is a house and a tree", "nothing", "one two three four five six"]
    for lowercase, words in ((False, "13a"), (True, "13a"), (True, "none")):
        bleu = Bleu(lowercase=lowercase, words=words)
        for start in (0, 3):
            bleu.update(
                torch.empty(0), MeasuredTranslations(torch.empty(0) > 0, given[start : start + 3], wanted[start : start + 3])
            )
        direct = sacrebleu.corpus_bleu(given, [wanted], lowercase=lowercase, tokenize=words, force=True).score
        assert float(bleu.compute()) == pytest.approx(direct, abs=1e-9) and 10.0 < direct < 90.0


@torch.no_grad()
def test_evaluation_decodes_and_knows_the_references():
    config = make_config("translation", **SMALL, task_options=TINY)
    session = Session(config, Settings(device="cpu"))
    found = session.evaluate("test")
    assert list(found) == ["loss", "bleu", "accuracy", "perplexity"]
    task, model = session.task, session.model.eval()
    examples = task.examples("test")
    given, wanted, nats, right, count = [], [], 0.0, 0, 0
    for index in range(len(examples)):
        batch = examples.batch([index])
        given += task.decoded([each.tokens for each in model(batch, task.options.search)])
        wanted += [task.texts("test").target[number] for _, number in batch["numbers"].tolist()]
        scores = model(batch)
        nats -= float(scores.log_softmax(-1).gather(1, batch["targets"][:, None]).sum())
        right, count = right + int((scores.argmax(1) == batch["targets"]).sum()), count + len(batch["targets"])
    assert sorted(wanted) == sorted(task.texts("test").target)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(given, [wanted]).score, abs=1e-9)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert found["accuracy"] == pytest.approx(right / count, rel=1e-6)


def test_bleu_of_the_references_is_whole():
    task = Translate(**TINY)
    ends = {text: task.tokenizer.encode(text).ids for text in task.texts("test").target}

    def forward(batch, search=None):
        if search is None:
            return torch.zeros(len(batch["targets"]), 5)
        return [SimpleNamespace(tokens=ends[task.texts("test").target[number]]) for _, number in batch["numbers"].tolist()]

    batch = task.examples("test").batch([0])
    batch["targets"] = batch["targets"] % 5
    bleu = task.metrics()["bleu"]
    bleu.update(*task.measured(forward, forward(batch), batch))
    assert float(bleu.compute()) == pytest.approx(100.0)


# Runs


def test_runs_are_deterministic_and_generate(tmp_path):
    config = make_config("translation", **SMALL, steps=3, task_options=TINY)
    first, second = (train(config, tmp_path / name, Settings(device="cpu")) for name in ("one", "two"))
    assert first["test"] == second["test"] and first["validation"] == second["validation"] and first["sample"]
    assert (tmp_path / "one" / "tokenizer.json").is_file()
    lines = tmp_path / "lines.txt"
    lines.write_text("kaka moti\n\nsuka\n")
    runner = CliRunner()
    for prompt, count in ((str(lines), 3), ("kaka moti", 1)):
        result = runner.invoke(app, ["generate", str(tmp_path / "one"), "--prompt", prompt, "--device", "cpu"])
        assert result.exit_code == 0, result.output
        written = (tmp_path / "one" / "generated" / "translation.txt").read_text().split("\n")
        assert len(written) == count + 1 and written[-1] == "" and (count == 1 or written[1] == "")


def test_a_run_starts_from_another_encoder(tmp_path):
    config = make_config("translation", **SMALL, steps=1, task_options=TINY)
    train(config, tmp_path / "one", Settings(device="cpu"))
    session = Session(with_fields(config, {"start": str(tmp_path / "one"), "seed": 5}), Settings(device="cpu"))
    fresh = Session(with_fields(config, {"seed": 5}), Settings(device="cpu"))
    assert not torch.equal(session.model.embedding.weight, fresh.model.embedding.weight)
    assert torch.equal(session.model.decoder.layers[0].attention.q.weight, fresh.model.decoder.layers[0].attention.q.weight)


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        (None, Sampling(), "prompt must be a text to translate"),
        ("kaka", Sampling(count=2), "count must be left out"),
        ("kaka", Sampling(temperature=0.5), "temperature must be left out"),
        ("kaka " * 30, Sampling(), "sentences must have at most 24 tokens"),
    ],
)
def test_what_cannot_be_translated(prompt, sampling, words, tmp_path):
    task = Translate(**TINY)
    with pytest.raises(ValueError, match=words):
        task.generate(model_of(task), prompt, sampling, tmp_path)
