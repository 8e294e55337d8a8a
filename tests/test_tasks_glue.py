"""GLUE and the six sets of sentences: their files, samples, metrics, models and predictions."""

import lzma
import sys
from types import SimpleNamespace

import pytest
import torch
from training import losses_of

import lagwise
from lagwise.lab.checkpoint import load_latest
from lagwise.lab.config import Config, with_fields
from lagwise.lab.experiment import make_config
from lagwise.lab.loop import Settings
from lagwise.lab.run import train
from lagwise.lab.tasks import TASKS
from lagwise.lab.tasks.base import SPLITS, Sampling
from lagwise.lab.tasks.text import glue, sentences, words
from lagwise.lab.tasks.text.glue_tasks import Cola, Mnli, Mrpc, Qqp, Rte, Sst2, Stsb
from lagwise.lab.tasks.text.sentence_sets import Cr, ImdbWords, Mr, SstWords, Trec
from lagwise.lab.tasks.text.sentences import FOLDS
from lagwise.lab.tasks.text.words import Vocabulary, read_vectors

GLUE = {name: kind for name, kind in TASKS.items() if issubclass(kind, glue.Glue)}
SETS = {name: kind for name, kind in TASKS.items() if issubclass(kind, sentences.Sentences)}
SMALL = {"dim": 16, "layers": 1, "heads": 2, "hidden": 32, "batch": 16, "rate": 1e-2}
CPU = Settings(device="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keeps trained tokenizers out of the user's cache."""
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def tiny(name, **fields):
    return with_fields(Config(task=name), {**SMALL, **fields})


def write_json(folder, **files):
    """Writes files of lists of lines, and returns their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / f"{name}.tsv").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", [*GLUE, *SETS])
def test_a_sample_is_fixed_and_its_splits_have_all_classes(name):
    task, again = TASKS[name](), TASKS[name](seed=5)
    assert task.is_sample and task.facts.metric == next(iter(task.metrics()))
    for split in SPLITS:
        examples, same = task.examples(split), again.examples(split)
        batch, other = (each.batch(range(len(examples))) for each in (examples, same))
        assert all(torch.equal(batch[column], other[column]) for column in batch)
        assert len(batch["label"].unique()) == (3 if name == "glue/stsb" else task.classes)
    train, test = (task.examples(split).batch(range(20)) for split in ("train", "test"))
    assert train["tokens"].shape != test["tokens"].shape or not torch.equal(train["tokens"], test["tokens"])


@pytest.mark.parametrize("name", [*GLUE, *SETS])
def test_thirty_steps_lower_the_loss_of_the_sample(name):
    losses = losses_of(TASKS[name](), tiny(name), 30)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("name", [*GLUE, *SETS])
def test_defaults_and_presets_make_configs(name):
    kind = TASKS[name]
    assert make_config(name).task_options == kind.defaults.get("task_options", {})
    for preset in kind.presets:
        config = make_config(name, preset=preset)
        assert config.steps == kind.presets[preset]["steps"]
        kind(**config.task_options)
        width = config.dim // config.heads
        lagwise.make(config.encoding, heads=config.heads, head_dim=width, dim=config.dim, **config.encoding_options)


def test_the_papers_sizes_of_the_six_sets():
    config = make_config("mr", preset="paper-at5")
    sizes = (config.layers, config.heads, config.dim, config.hidden, config.batch, config.rate, config.attention_dropout)
    assert sizes == (5, 6, 300, 600, 64, 2e-4, 0.3) and config.task_options == {"input_dropout": 0.4, "first_only": True}
    assert config.encoding_options["widths"] == [16, 4] and config.encoding_options["slopes"] == [1.0, 10.0]


# Files of GLUE

COLA = ['gj04\t1\t\tShe said "no.', "gj04\t0\t*\tSaid she no.", "bc01\t1\t\tDogs bark.", 'bc01\t1\t\tÉva "sings".']
MRPC_HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
MNLI_HEADER = "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI_FIELDS = "0\t1\t1n\tfiction\t( a )\t( b )\t(ROOT a)\t(ROOT b)"
QQP_HEADER = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate"


def test_cola_has_no_header_and_quotes_are_characters(tmp_path):
    task = Cola(write_json(tmp_path / "CoLA", train=COLA, dev=COLA[:2], test=["index\tsentence", '0\tA "b.']).parent)
    assert task.read("train", labelled=True)[0] == (('She said "no.',), 1.0)
    assert task.read("test", labelled=False) == [(('A "b.',), 0.0)]
    assert [item.label for item in task.items("test")] == [1.0, 0.0]
    kept = task.items("validation")
    assert len(kept) == 1 and len(task.items("train")) == 3 and kept[0] not in task.items("train")


def test_mrpc_may_begin_with_a_byte_order_mark(tmp_path):
    write_json(tmp_path, train=["\ufeff" + MRPC_HEADER, "1\t7\t8\tA cat .\tOne cat .", "0\t9\t8\tA dog .\tOne cat ."])
    assert Mrpc(tmp_path).read("train", labelled=True) == [(("A cat .", "One cat ."), 1.0), (("A dog .", "One cat ."), 0.0)]


def test_stsb_has_scores(tmp_path):
    header = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
    write_json(tmp_path, dev=[header, "0\tg\tf\t2012\t1\tn\tn\tA plane.\tAn air plane.\t4.750"])
    task = Stsb(tmp_path)
    assert task.items("test") == [(("A plane.", "An air plane."), 4.75)]
    write_json(tmp_path, dev=[header, "0\tg\tf\t2012\t1\tn\tn\tA plane.\tAn air plane.\t5.2"])
    with pytest.raises(ValueError, match=r"dev.tsv, line 2: the label is '5.2', but expected is a number from 0 to 5"):
        task.read("dev", labelled=True)


def mnli(tmp_path):
    def dev(*labels):
        head = f"{MNLI_HEADER}\tsentence1\tsentence2\tlabel1\tlabel2\tlabel3\tlabel4\tlabel5\tgold_label"
        return [head, *(f"{MNLI_FIELDS}\ta {i}\tb\tneutral\tx\tx\tx\tx\t{label}" for i, label in enumerate(labels))]

    train = [f"{MNLI_HEADER}\tsentence1\tsentence2\tlabel1\tgold_label"]
    train += [f"{MNLI_FIELDS}\tone {i}\ttwo\tneutral\tcontradiction" for i in range(20)]
    files = {"dev_matched": dev("entailment", "neutral"), "dev_mismatched": dev("contradiction", "neutral", "entailment")}
    return Mnli(write_json(tmp_path / "MNLI", train=train, **files).parent)


def test_mnli_evaluates_both_parts_by_turns_and_names_them(tmp_path):
    task = mnli(tmp_path)
    batch = task.examples("test").batch(range(5))
    assert batch["part"].tolist() == [0, 1, 0, 1, 1] and batch["label"].tolist() == [0, 2, 1, 1, 0]
    metrics = task.metrics()
    # Right in the first of matched, and in the first two of mismatched.
    outputs = torch.eye(3)[[0, 2, 2, 1, 1]]
    for metric in metrics.values():
        metric.update(*task.answers(outputs, batch))
    assert {name: metric.compute().item() for name, metric in metrics.items()} == pytest.approx(
        {"matched": 1 / 2, "mismatched": 2 / 3}
    )
    assert task.examples("train").batch([0])["label"].item() == 2 and len(task.items("validation")) == 2


def test_mismatched_is_no_number_where_there_is_none(tmp_path):
    task = mnli(tmp_path)
    batch = task.examples("validation").batch(range(2))
    metric = task.metrics()["mismatched"]
    metric.update(*task.answers(torch.eye(3)[:2], batch))
    assert metric.compute().isnan()


def test_qqp_leaves_out_broken_lines_and_says_so(tmp_path):
    lines = [QQP_HEADER, "1\t2\t3\tWhy?\tHow?\t0", '"\tWas it?\t0', "4\t5\t6\tWho?\tWho is?\t1"]
    task = Qqp(write_json(tmp_path, train=lines))
    with pytest.warns(UserWarning, match="1 lines are left out.*train.tsv, line 3: has 3 columns, but expected are 6"):
        assert task.read("train", labelled=True) == [(("Why?", "How?"), 0.0), (("Who?", "Who is?"), 1.0)]
    write_json(tmp_path, train=[QQP_HEADER, *["1\t2"] * 11])
    with pytest.raises(ValueError, match=r"train.tsv, line 2: has 2 columns.*and 10 more lines"):
        task.read("train", labelled=True)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["index\tsentence1\tsentence2\tlabel", "0\ta\tb"], r"train.tsv, line 2: has 3 columns, but expected are 4"),
        (
            ["index\tsentence1\tsentence2\tlabel", "0\ta\tb\tmaybe"],
            r"line 2: the label is 'maybe', but expected is one of entail",
        ),
        (["index\tsentence1\tlabel", "0\ta\tentailment"], r"train.tsv, line 1: has no column 'sentence2', but expected are"),
        (["index\tsentence1\tsentence2\tlabel"], r"train.tsv, line 1: there are no examples"),
    ],
)
def test_malformed_files(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        Rte(write_json(tmp_path, train=lines)).examples("train")


def test_bytes_that_are_no_text_and_files_that_are_missing(tmp_path):
    (tmp_path / "train.tsv").write_bytes(b"sentence\tlabel\nfine\t1\n\xff\xfe\t0\n")
    with pytest.raises(ValueError, match=r"train.tsv, line 3: the text is .*, but expected is UTF-8"):
        Sst2(tmp_path).examples("train")
    with pytest.raises(ValueError, match=r"data must be a folder with dev.tsv.*SST-2 has none: get the tasks"):
        Sst2(tmp_path).items("test")


def test_files_may_be_compressed(tmp_path):
    (tmp_path / "dev.tsv.xz").write_bytes(lzma.compress(b"sentence\tlabel\ngood \t1\n"))
    assert Sst2(tmp_path).items("test") == [(("good ",), 1.0)]


def test_the_hub(monkeypatch):
    def load_dataset(name, config, *, split):
        assert name == "nyu-mll/glue" and config == "mnli"
        labels = {"train": [0, 2], "validation_matched": [1, 1], "validation_mismatched": [2, 0], "test_matched": [-1, -1]}
        return {"premise": ["a b", "c"], "hypothesis": ["d", "e"], "label": labels[split]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = Mnli("hub")
    assert [item.label for item in task.items("test")] == [1.0, 2.0, 1.0, 0.0]
    assert task.read("test_matched", labelled=False)[0] == (("a b", "d"), 0.0)


# Tokens and metrics


def test_pairs_have_special_tokens_around_them_and_know_where_the_second_begins():
    task = Mrpc()
    batch = task.examples("train").batch([0])
    names = [task.tokenizer.id_to_token(token) for token in batch["tokens"][0].tolist()]
    ends = [index for index, name in enumerate(names) if name == "[SEP]"]
    assert names[0] == "[CLS]" and len(ends) == 2 and ends[1] == len(names) - 1
    assert batch["first"].item() == ends[0] + 1
    single = Sst2().examples("train").batch([0, 1, 2])
    assert torch.equal(single["first"], single["lengths"])


def test_the_longer_text_of_a_pair_is_cut():
    task = Mrpc(length=12)
    batch = task.examples("train").batch(range(20))
    assert batch["lengths"].max() == 12 and (batch["first"] < 11).all() and (batch["first"] > 3).all()
    assert task.examples("train", 9).batch(range(20))["lengths"].max() == 9


def test_words_that_look_like_special_tokens_are_words(tmp_path):
    task = Sst2(write_json(tmp_path, train=["sentence\tlabel", "a b\t1", "b a\t0"], dev=["sentence\tlabel", "a [SEP] b\t1"]))
    tokens = task.examples("test").batch([0])["tokens"][0].tolist()
    assert tokens.count(task.tokenizer.token_to_id("[SEP]")) == 1


def test_matthews_of_a_known_table():
    task, metric = Cola(), Cola().metrics()["matthews"]
    truth = torch.tensor([1] * 6 + [0] * 4)
    outputs = torch.eye(2)[[1, 1, 1, 1, 0, 0, 0, 0, 0, 1]]
    metric.update(*task.answers(outputs, {"label": truth}))
    # 4 and 3 right, 1 and 2 wrong.
    assert metric.compute().item() == pytest.approx((4 * 3 - 1 * 2) / (5 * 6 * 4 * 5) ** 0.5)


def test_f1_counts_paraphrases():
    task, metrics = Mrpc(), Mrpc().metrics()
    batch = {"label": torch.tensor([1, 1, 1, 0, 0])}
    for metric in metrics.values():
        metric.update(*task.answers(torch.eye(2)[[1, 1, 0, 1, 0]], batch))
    assert metrics["f1"].compute().item() == pytest.approx(2 / 3) and metrics["accuracy"].compute().item() == pytest.approx(0.6)


def test_correlations_of_scores():
    task, metrics = Stsb(), Stsb().metrics()
    outputs, batch = torch.tensor([[0.0], [1.0], [2.0], [9.0]]), {"label": torch.tensor([0.0, 1.0, 2.0, 5.0])}
    for metric in metrics.values():
        metric.update(*task.answers(outputs, batch))
    x, y = outputs[:, 0] - outputs.mean(), batch["label"] - batch["label"].mean()
    assert metrics["pearson"].compute().item() == pytest.approx((x @ y / (x.norm() * y.norm())).item(), abs=1e-5)
    assert metrics["spearman"].compute().item() == pytest.approx(1.0, abs=1e-5)
    total, count = task.loss(outputs, batch)
    assert total.item() == 16.0 and count.item() == 4.0


# Models


def test_padding_does_not_matter():
    task = Mrpc()
    model = task.model(tiny("glue/mrpc")).eval()
    examples = task.examples("train")
    lengths = examples.sizes
    short, long = int(lengths.argmin()), int(lengths.argmax())
    assert lengths[short] < lengths[long]
    torch.testing.assert_close(model(examples.batch([short, long]))[:1], model(examples.batch([short])))


def test_the_second_text_is_told_apart():
    task = Mrpc()
    model, batch = task.model(tiny("glue/mrpc")).eval(), task.examples("train").batch([0, 1])
    assert not torch.allclose(model(batch), model({**batch, "first": batch["lengths"]}))


@pytest.fixture
def bert(tmp_path):
    """A tiny BERT with its vocabulary."""
    from transformers import BertConfig, BertModel

    folder = tmp_path / "bert"
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz.,",
        *(f"##{x}" for x in "abcdefghijklmnopqrstuvwxyz"),
    ]
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=128,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("".join(word + "\n" for word in vocabulary))
    return str(folder)


@pytest.mark.parametrize(
    ("encoding", "options"),
    [("shaw", {}), ("t5", {"absolute": "fade", "fade": 4}), ("none", {"absolute": "keep"}), ("learned", {})],
)
def test_hugging_face_models_train(bert, encoding, options):
    from lagwise.hf.conversion import FadedEmbedding

    task = Rte(model="hf", path=bert, **options)
    config = tiny("glue/rte", encoding=encoding, rate=3e-3, batch=8)
    losses = losses_of(task, config, 12)
    assert sum(losses[-4:]) < sum(losses[:4])
    model = task.model(config)
    assert model.eval()(task.examples("test").batch([0, 3])).shape == (2, 2)
    assert hasattr(model.inner.config, "lagwise") == (encoding not in ("none", "learned"))
    if options.get("absolute") == "fade":
        batch = task.examples("train").batch([0])
        factors = []
        for _ in range(6):
            model.train()(batch)
            factors += [module.lagwise_factor.item() for module in model.modules() if isinstance(module, FadedEmbedding)]
        assert factors == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_weights_in_half_precision_are_trained_in_full(bert):
    from transformers import BertModel

    BertModel.from_pretrained(bert).half().save_pretrained(bert)
    model = Rte(model="hf", path=bert).model(tiny("glue/rte", encoding="shaw"))
    assert {x.dtype for x in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="absolute must be 'remove' or 'keep' with the encoding 'learned'"):
        Rte(model="hf", path=bert, absolute="fade", fade=4).model(tiny("glue/rte", encoding="learned"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "hf"}, "path must be the folder or name of a model with model='hf'"),
        ({"absolute": "fade"}, "fade must be a number of steps with absolute='fade'"),
        ({"pooling": "sum"}, "pooling must be one of mean, last, first, but is 'sum'"),
        ({"length": 0}, "length must be"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        Rte(**options)


def test_predictions_are_in_the_leaderboards_format(tmp_path):
    class Fixed(torch.nn.Linear):
        def forward(self, batch):
            return batch["lengths"][:, None] * torch.tensor([[0.0, 1.0, 0.5]])

    found = Mnli().generate(Fixed(1, 1), None, Sampling(), tmp_path / "out")
    assert [path.name for path in found] == ["MNLI-m.tsv", "MNLI-mm.tsv"]
    lines = found[0].read_text().splitlines()
    assert lines[:2] == ["index\tprediction", "0\tneutral"] and lines[-1] == "11\tneutral" and len(lines) == 13
    (scores,) = Stsb().generate(Fixed(1, 1), None, Sampling(), tmp_path / "out")
    assert scores.name == "STS-B.tsv" and scores.read_text().splitlines()[1] == "0\t0.000"
    assert Stsb.layout.prediction(7.1) == "5.000"


def test_a_run_keeps_its_tokenizer_and_another_starts_from_it(tmp_path):
    fields = {**SMALL, "steps": 2, "dropout": 0.0}
    result = train(make_config("glue/mrpc", "t5", **fields), tmp_path / "one", CPU)
    assert set(result["test"]) == {"loss", "f1", "accuracy"}
    tokenizer = tmp_path / "one" / "tokenizer.json"
    again = make_config(
        "glue/rte", "t5", **{**fields, "start": str(tmp_path / "one"), "task.tokenizer": str(tokenizer), "rate": 0.0}
    )
    train(again, tmp_path / "two", CPU)
    one, two = (load_latest(tmp_path / name / "checkpoints") for name in ("one", "two"))
    assert one is not None and two is not None
    assert torch.equal(one.tensors["model"]["embedding.weight"], two.tensors["model"]["embedding.weight"])
    assert (tmp_path / "two" / "tokenizer.json").read_text() == tokenizer.read_text()


# The six sets


def folds(tmp_path, kind=Mr, count=37):
    for name, word in zip(kind.names, ("bad", "good"), strict=True):
        (tmp_path / name).write_bytes("".join(f"{word} na\xefve {i} .\n" for i in range(count)).encode("latin-1"))
    return tmp_path


def test_folds_share_out_all_sentences(tmp_path):
    data = folds(tmp_path)
    tested = []
    for fold in range(FOLDS):
        found = Mr(data, fold=fold).sentences
        parts = [set(found[split]) for split in SPLITS]
        assert sum(map(len, parts)) == 74 == len(set().union(*parts)) and len(parts[2]) in (7, 8)
        tested += found["test"]
    assert len(tested) == len(set(tested)) == 74 and ("bad naïve 3 .", 0) in tested
    assert Mr(data, fold=3).sentences == Mr(data, fold=3, seed=9).sentences


def test_wrong_lines_and_missing_files_of_sets(tmp_path):
    (folds(tmp_path, Cr) / "custrev.pos").write_text("good\n\nfine\n")
    with pytest.raises(ValueError, match=r"custrev.pos, line 2: the text is empty"):
        Cr(tmp_path).examples("train")
    with pytest.raises(ValueError, match=r"data must be a folder with rt-polarity.neg"):
        Mr(tmp_path).examples("train")
    with pytest.raises(ValueError, match="fold must be from 0 to 9, but is 10"):
        Mr(fold=10)


def test_sets_of_the_hub_have_the_folds_of_the_files(tmp_path, monkeypatch):
    data = Mr(folds(tmp_path))
    every = [each for split in SPLITS for each in data.sentences[split]]

    def load_dataset(name, *, split):
        assert name == "cornell-movie-review-data/rotten_tomatoes"
        mine = every[("train", "validation", "test").index(split) :: 3]
        return {"text": [text for text, _ in mine], "label": [label for _, label in mine]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert Mr("hub").sentences == data.sentences


def test_trec(tmp_path):
    (tmp_path / "train_5500.label").write_bytes(b"DESC:manner How did it go ?\nNUM:date When was it ?\n" * 6)
    (tmp_path / "TREC_10.label").write_bytes("HUM:ind Who was Andr\xe9 ?\n".encode("latin-1"))
    task = Trec(tmp_path)
    assert task.sentences["test"] == [("who was andré ?", 3)] and len(task.sentences["validation"]) == 1
    assert set(task.examples("train").batch(range(11))["label"].tolist()) == {1, 5}
    (tmp_path / "TREC_10.label").write_text("HUM:ind Who ?\nWhat is it ?\n")
    with pytest.raises(ValueError, match=r"TREC_10.label, line 2: begins with 'What is it \?', but expected is COARSE:fine"):
        Trec(tmp_path).examples("test")


def test_sst2_in_its_own_layout_and_in_glues(tmp_path):
    own = write_json(tmp_path / "own", train=["fine\t1", "bad\t0"], dev=["good\t1"], test=["poor\t0"])
    assert SstWords(own).sentences == {"train": [("fine", 1), ("bad", 0)], "validation": [("good", 1)], "test": [("poor", 0)]}
    header = "sentence\tlabel"
    write_json(tmp_path / "SST-2", train=[header, "a\t1", "b\t0"], dev=[header, "c\t1"], test=["index\tsentence", "0\td"])
    found = SstWords(tmp_path).sentences
    assert found["test"] == [("c", 1)] and len(found["train"]) == len(found["validation"]) == 1


def test_imdb_as_words(tmp_path):
    (tmp_path / "train.tsv").write_text(
        "".join(f"{n % 2}\t{n}\tIt's good.<br /><br />Really good, film {n}!\n" for n in range(20))
    )
    (tmp_path / "test.tsv").write_text("1\t7\tA (very) caf\u00e9-like film\n")
    task = ImdbWords(tmp_path, least=2, length=4)
    assert task.sentences["test"] == [("a ( very ) café - like film", 1)]
    assert len(task.sentences["train"]) == 18 and len(task.sentences["validation"]) == 2
    assert words.UNKNOWN not in task.vocabulary.encode("it's good , film !") and task.vocabulary.encode("café") == [words.UNKNOWN]
    assert task.examples("train").batch([0])["tokens"].shape == (1, 4)


def vectors(tmp_path, *lines):
    path = tmp_path / "vectors.txt"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_vectors_of_words(tmp_path):
    path = vectors(tmp_path, "the 1 2 3", "at name 4 5 6", "sea -1 .5 2e-1", "the 9 9 9", "never 0 0 0")
    found, table = read_vectors(path, {"the", "at", "sea", "shore"})
    assert found == ["the", "sea"] and torch.equal(table, torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.5, 0.2]]))
    assert Vocabulary(found).encode("the shore sea") == [2, words.UNKNOWN, 3] and Vocabulary(found).encode("") == [words.UNKNOWN]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["the 1 2 3", "sea 1 2"], r"vectors.txt, line 2: has 2 numbers, but expected are a word and 3 numbers"),
        (["the 1 2 x"], r"vectors.txt, line 1: could not convert .*, but expected are a word and 3 numbers"),
        (["2 3"], r"vectors.txt, line 1: has 1 numbers"),
        (["far 1 2 3"], r"vectors must be a file with words of the data, but .* has none of 2"),
    ],
)
def test_wrong_vectors(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_vectors(vectors(tmp_path, *lines), {"the", "sea"})
    with pytest.raises(ValueError, match="vectors must be a file with a word and its numbers"):
        read_vectors(tmp_path / "none.txt", {"the"})


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_vectors_stay_through_a_run_that_goes_on(tmp_path, frozen):
    path = vectors(
        tmp_path, *(f"{word} {' '.join(str(i + n) for i in range(16))}" for n, word in enumerate(["the", "a", "film", "of"]))
    )
    options = {"task.vectors": str(path), "task.frozen": frozen}
    config = make_config("mr", "t5", **{**SMALL, **options, "steps": 4})
    settings = Settings(device="cpu", save_every=2)
    train(config, tmp_path / "run", settings)
    checkpoint = load_latest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    table = checkpoint.tensors["model"]["embedding.weight"]
    assert table.shape == (6, 16) and torch.equal(table[2:], Mr(vectors=str(path)).vectors[1]) == frozen
    result = train(config, tmp_path / "run", settings, resume=True)
    assert result["steps"] == 4
    with pytest.raises(ValueError, match="dim must be the 16 of the vectors, but is 32: dim=16"):
        Mr(vectors=str(path)).model(tiny("mr", dim=32))


def test_the_paper_has_the_encoding_in_the_first_layer_only():
    config = tiny("mr", encoding="t5", layers=3)
    model = Mr(first_only=True).model(config)
    assert [type(layer.attention.encoding).__name__ for layer in model.encoder.layers] == ["T5", "NoEncoding", "NoEncoding"]
    with pytest.raises(ValueError, match="first_only must be false"):
        Mr(first_only=True).model(tiny("mr", per_layer=True))


def test_scores_are_those_of_the_last_word():
    task = Trec()
    model, examples = task.model(tiny("trec")).eval(), task.examples("train")
    short, long = int(examples.sizes.argmin()), int(examples.sizes.argmax())
    assert examples.sizes[short] < examples.sizes[long]
    torch.testing.assert_close(model(examples.batch([short, long]))[:1], model(examples.batch([short])))
