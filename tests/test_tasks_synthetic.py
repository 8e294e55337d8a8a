"""The generated tasks: known properties, hand-worked cases, files, metrics, and training that learns."""

import lzma
import re
from dataclasses import fields
from statistics import median

import pytest
import torch
from training import losses_of

from lagwise import make
from lagwise.encodings import ENCODINGS
from lagwise.lab.config import FIELDS, Config, with_fields
from lagwise.lab.tasks.base import SPLITS
from lagwise.lab.tasks.files import cache_folder
from lagwise.lab.tasks.lra.listops import FILES, WORDS, ExpressionGrammar, ListOps, fitting_roots, write_expressions
from lagwise.lab.tasks.synthetic import SYMBOLS, Adding, Process50, Reber, Within, automaton, ending_probabilities, reber_strings

TASKS = {"process-50": Process50, "reber": Reber, "adding": Adding, "listops": ListOps}
SMALL = {"train": 60, "validation": 20, "test": 20}
SHORT = {**SMALL, "shortest": 10, "longest": 60, "depth": 4}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keeps what the tests make away from the user's own cache."""
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def options_of(name):
    return SHORT if name == "listops" else SMALL


def small(name, seed=0, **options):
    return TASKS[name](seed=seed, **{**options_of(name), **options})


def whole(examples):
    return examples.batch(range(len(examples)))


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", TASKS)
class TestEveryTask:
    def test_a_seed_fixes_the_examples(self, name):
        for split in SPLITS:
            assert same(whole(small(name).examples(split)), whole(small(name).examples(split)))
            assert not same(whole(small(name).examples(split)), whole(small(name, seed=1).examples(split)))

    def test_the_default_generator_is_left_alone(self, name):
        before = torch.get_rng_state()
        whole(small(name).examples("train"))
        assert torch.equal(before, torch.get_rng_state())

    def test_splits_have_their_sizes_and_share_nothing(self, name):
        task = small(name)
        rows = {split: {bytes(str(row.tolist()), "ascii") for row in first(whole(task.examples(split)))} for split in SPLITS}
        for split in SPLITS:
            assert len(task.examples(split)) == SMALL[split] == len(rows[split])
        assert (
            not rows["train"] & rows["validation"] and not rows["train"] & rows["test"] and not rows["validation"] & rows["test"]
        )

    def test_defaults_and_presets_are_fields_that_make_models(self, name):
        task = small(name)
        for fields_of_preset in ({}, *TASKS[name].presets.values()):
            chosen = {**TASKS[name].defaults, **fields_of_preset}
            assert set(chosen) <= set(FIELDS)
            config = with_fields(
                Config(task=name), {**chosen, "layers": 1, "tied": False, "dim": 16 * chosen["heads"], "hidden": 8}
            )
            outputs = task.model(config)(task.examples("test").batch([0, 1, 2]))
            assert outputs.shape[0] == 3 and outputs.isfinite().all()
            TASKS[name](**chosen.get("task_options", {}))

    def test_every_encoding_takes_the_options_for_it(self, name):
        for encoding in ENCODINGS:
            make(encoding, heads=2, head_dim=8, dim=16, **small(name).encoding_options(encoding))

    def test_the_facts_are_told(self, name):
        facts = TASKS[name].facts
        assert facts.metric == next(iter(small(name).metrics()))
        assert all(getattr(facts, each.name) for each in fields(facts) if each.name not in ("files", "hub"))
        assert not small(name).is_sample

    def test_training_lowers_the_loss(self, name):
        """Few examples are learnt by heart in a few steps."""
        config = Config(task=name, encoding="t5", dim=32, layers=1, heads=2, hidden=32, norm="post", batch=16, rate=5e-3)
        losses = losses_of(small(name, train=8), config, 30)
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5])

    def test_metrics_of_right_and_wrong_answers(self, name):
        task = small(name)
        batch = whole(task.examples("test"))
        if name == "adding":
            right, wrong = batch["target"][:, None], batch["target"][:, None] + 0.1
        else:
            right = torch.nn.functional.one_hot(batch["label"], task.classes).float()
            wrong = right.roll(1, 1)
        for outputs, accuracy in ((right, 1.0), (wrong, 0.0)):
            metric = next(iter(task.metrics().values()))
            metric.update(*task.answers(outputs, batch))
            assert metric.compute().item() == accuracy
        total, count = task.loss(right, batch)
        assert count == SMALL["test"] and total < task.loss(wrong, batch)[0]

    def test_unknown_and_impossible_options_raise(self, name):
        with pytest.raises(ValueError, match="did you mean 'train'"):
            TASKS[name](trian=3)
        with pytest.raises(ValueError, match=r"test must be .*but is 0"):
            TASKS[name](test=0)
        with pytest.raises(ValueError, match="not on the Hub"):
            TASKS[name]("hub")


def first(batch):
    """Returns what a model sees of a batch."""
    return batch["tokens"] if "tokens" in batch else batch["values"]


class TestProcess50:
    def test_shares_of_symbols_and_of_changes(self):
        batch = whole(Process50(test=20_000).examples("test"))
        tokens, label = batch["tokens"].double(), batch["label"]
        for chain, (rise, fall) in enumerate(((0.2, 0.4), (0.3, 0.6))):
            mine = tokens[label == chain]
            before, after = mine[:, :-1], mine[:, 1:]
            assert abs(mine.mean() - 1 / 3) < 0.005
            assert abs(after[before == 0].mean() - rise) < 0.005
            assert abs(1 - after[before == 1].mean() - fall) < 0.005
        assert abs(label.double().mean() - 0.5) < 0.02

    def test_the_best_rule_reaches_what_the_notes_say(self):
        """The likelihood ratio of the two chains is right in 85.3 % of all cases, the best rule for counts in 57.8 %."""
        batch = whole(Process50(test=20_000).examples("test"))
        tokens, label = batch["tokens"], batch["label"]
        leave = torch.tensor([[0.2, 0.4], [0.3, 0.6]]).double()
        before, changes = tokens[:, :-1], tokens[:, 1:] != tokens[:, :-1]
        scores = [torch.where(changes, chain[before], 1 - chain[before]).log().sum(1) for chain in leave]
        assert abs(((scores[1] > scores[0]).long() == label).double().mean() - 0.853) < 0.008
        counts = torch.stack([torch.bincount(tokens[label == chain].sum(1), minlength=51) for chain in (0, 1)])
        assert abs(counts.max(0).values.sum() / 20_000 - 0.578) < 0.012

    def test_any_length(self):
        assert Process50(**SMALL).examples("test", 333).batch([0])["tokens"].shape == (1, 333)
        assert Process50(length=7, **SMALL).examples("test").batch([0])["tokens"].shape == (1, 7)
        with pytest.raises(ValueError, match="length must be"):
            Process50().examples("test", 0)


# Written by hand from the automaton: x, a string of the grammar, the other symbol, a string of the grammar.
REBER = r"B(?:TS*X(?:S|XT+V(?:PXT+V)*(?:V|PS))|PT+V(?:PXT+V)*(?:V|PS))E"


def letters(tokens):
    return "".join(SYMBOLS[code] for code in tokens)


class TestReber:
    def test_strings_are_of_the_grammar_and_ask_for_their_first_symbol(self):
        batch = whole(Reber(test=300).examples("test"))
        for row, length, label in zip(batch["tokens"].tolist(), batch["lengths"].tolist(), batch["label"].tolist(), strict=True):
            string = letters(row[:length])
            assert re.fullmatch(f"T{REBER}P{REBER}|P{REBER}T{REBER}", string), string
            assert string[0] == "TP"[label]

    def test_the_shortest_string_is_as_likely_as_its_choices(self):
        """The modules BTXSE need three choices of one half each, and x one: one string in 64 is the shortest."""
        drawn = reber_strings(20_000, range(1, 498), torch.Generator().manual_seed(0))
        share = sum(len(string) == 12 for string in drawn) / len(drawn)
        assert abs(share - 1 / 64) < 0.003
        _, after = automaton()
        assert ending_probabilities(after, range(1, 400))[0, 0] == pytest.approx(1.0)
        assert ending_probabilities(after, range(0, 12))[0, 0] == pytest.approx(1 / 64)

    def test_strings_of_one_length_have_the_shares_of_the_grammar(self):
        """Drawn for a length, and chosen by it from all: the same shares of strings that begin with one module."""
        alone = reber_strings(4000, range(16, 17), torch.Generator().manual_seed(1))
        chosen = [s for s in reber_strings(60_000, range(1, 498), torch.Generator().manual_seed(2)) if len(s) == 16]
        assert len(chosen) > 1500 and {len(string) for string in alone} == {16}
        shares = [sum(letters(string)[2] == "T" for string in strings) / len(strings) for strings in (alone, chosen)]
        assert abs(shares[0] - shares[1]) < 0.04

    def test_longer_strings(self):
        batch = whole(Reber(**SMALL).examples("test", 200))
        assert batch["tokens"].shape == (20, 200) and set(batch["lengths"].tolist()) == {200}
        assert re.fullmatch(f"[TP]{REBER}[TP]{REBER}", letters(batch["tokens"][0].tolist()))

    def test_test_strings_do_not_depend_on_the_number_of_training_strings(self):
        tests = [whole(Reber(train=count, validation=30, test=30).examples("test")) for count in (10, 500)]
        assert same(*tests)

    @pytest.mark.parametrize("length", [5, 11])
    def test_a_length_without_strings_raises(self, length):
        with pytest.raises(ValueError, match="length must be one that strings of the grammar have"):
            Reber(**SMALL).examples("test", length)

    def test_a_length_with_few_strings_raises(self):
        with pytest.raises(ValueError, match="length must allow 100 different strings"):
            Reber(train=40, validation=30, test=30).examples("train", 13)


class TestAdding:
    def test_targets_are_made_of_the_marked_values(self):
        batch = whole(Adding(test=2000).examples("test"))
        values, marks = batch["values"].unbind(-1)
        assert torch.equal((marks == 1).sum(1), torch.full((2000,), 2))
        assert torch.allclose(batch["target"], 0.5 + (values * (marks == 1)).sum(1) / 4)
        assert ((marks == 1)[:, :10].any(1)).all() and not (marks == 1)[:, 49:].any()
        assert (marks[:, -1] == -1).all()
        assert (marks[:, 0] == -1).logical_or(marks[:, 0] == 1).all() and (marks[:, 0] == -1).any()
        assert values.abs().max() <= 1 and abs(values.mean()) < 0.01

    def test_lengths(self):
        task = Adding(**SMALL)
        assert task.examples("test", 500).batch([0, 1])["values"].shape == (2, 500, 2)
        with pytest.raises(ValueError, match="length must be at least 22, but is 21"):
            task.examples("test", 21)

    def test_within_counts_what_is_near(self):
        metric = Within(0.04)
        metric.update(torch.tensor([0.5, 0.53, 0.55]), torch.tensor([0.5, 0.5, 0.5]))
        metric.update(torch.tensor([0.2]), torch.tensor([0.5]))
        assert metric.compute().item() == 0.5

    def test_mean_squared_error(self):
        task = Adding(**SMALL)
        batch = {"target": torch.tensor([0.5, 0.5])}
        metric = task.metrics()["mse"]
        outputs = torch.tensor([[0.6], [0.8]])
        metric.update(*task.answers(outputs, batch))
        assert metric.compute().item() == pytest.approx(0.05)
        assert task.loss(outputs, batch)[0].item() == pytest.approx(0.1)


def value(words):
    """Computes an expression with a stack, word by word."""
    rules = {"[MIN": min, "[MAX": max, "[MED": lambda digits: int(median(digits)), "[SM": lambda digits: sum(digits) % 10}
    stack = []
    for word in words:
        if word != "]":
            stack.append(int(word) if word.isdigit() else word)
            continue
        digits = []
        while isinstance(stack[-1], int):
            digits.append(stack.pop())
        stack.append(rules[stack.pop()](digits))
    assert len(stack) == 1
    return stack[0]


def depth(words):
    """Returns how many operators are open at most."""
    opened, most = 0, 0
    for word in words:
        opened += word.startswith("[") - (word == "]")
        most = max(most, opened)
    return most


def words_of(batch, row):
    return [WORDS[code] for code in batch["tokens"][row, : batch["lengths"][row]].tolist()]


def official(path, lines, end="\r\n"):
    path.write_bytes("".join(line + end for line in ("Source\tTarget", *lines)).encode())


class TestListOps:
    def test_values_lengths_and_depths(self):
        batch = ListOps(train=100).examples("train").batch(range(100))
        depths = set()
        for row in range(100):
            words = words_of(batch, row)
            assert value(words) == batch["label"][row]
            assert 500 < len(words) < 2000
            depths.add(depth(words))
        assert max(depths) == 9

    def test_shares_of_words(self):
        batch = ListOps(train=300, longest=400, shortest=100).examples("train").batch(range(300))
        words = [word for row in range(300) for word in words_of(batch, row)]
        operators = [word for word in words if word.startswith("[")]
        for word in ("[MIN", "[MAX", "[MED", "[SM"):
            assert abs(operators.count(word) / len(operators) - 0.25) < 0.02
        digits = [word for word in words if word.isdigit()]
        for digit in range(10):
            assert abs(digits.count(str(digit)) / len(digits) - 0.1) < 0.01
        assert words.count("]") == len(operators)

    def test_two_levels_are_lists_of_digits(self):
        batch = ListOps(**SMALL, shortest=3, longest=13, depth=2).examples("train").batch(range(60))
        for row in range(60):
            words = words_of(batch, row)
            assert words[0] in WORDS[10:14] and words[-1] == "]" and all(word.isdigit() for word in words[1:-1])
            assert 2 <= len(words) - 2 <= 10

    def test_an_example_depends_on_its_number_alone(self):
        few, many = ListOps(**SHORT).examples("train"), ListOps(**{**SHORT, "train": 2500}).examples("train")
        assert same(few.batch([3, 50]), many.batch([3, 50]))
        assert not torch.equal(many.batch([2400])["tokens"], many.batch([400])["tokens"])

    def test_seeds_alone_or_among_others_give_the_same_expression(self):
        grammar = ExpressionGrammar(10, 60, 4, 10)
        seeds = torch.arange(1, 40)
        assert torch.equal(fitting_roots(seeds, grammar)[7:9], fitting_roots(seeds[7:9], grammar))
        tokens, ends, _ = write_expressions(fitting_roots(seeds, grammar), grammar)
        alone, _, _ = write_expressions(fitting_roots(seeds[7:8], grammar), grammar)
        assert torch.equal(tokens[ends[6] : ends[7]], alone)

    def test_the_cache_is_used_and_tells_seeds_and_grammars_apart(self, cache, monkeypatch):
        made = whole(small("listops").examples("train"))
        stored = list(cache.rglob("*"))
        assert [path.name for path in stored if path.is_file()] == ["train-0.pt"]
        small("listops", seed=1).examples("train").batch([0])
        small("listops", longest=70).examples("train").batch([0])
        assert len([path for path in cache.rglob("*.pt")]) == 3
        monkeypatch.setattr("lagwise.lab.tasks.lra.listops.fitting_roots", None)
        assert same(made, whole(small("listops").examples("train")))

    def test_the_cache_folder(self, monkeypatch, tmp_path):
        assert cache_folder() == tmp_path / "cache"
        monkeypatch.delenv("LAGWISE_CACHE")
        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache_folder() == tmp_path / "lagwise"

    def test_longer_expressions(self):
        lengths = whole(small("listops", depth=10).examples("test", 400))["lengths"]
        assert lengths.min() > 100 and lengths.max() < 400

    def test_impossible_lengths_raise(self):
        with pytest.raises(ValueError, match="none was found: choose other lengths"):
            small("listops", depth=2).examples("test", 400).batch([0])

    def test_official_files(self, tmp_path):
        lines = ["( ( ( [MAX 2 ) ( ( ( [MIN 8 ) 7 ) ] ) ) ] )\t7", "( ( ( [SM 9 ) 4 ) ] )\t3"]
        for name in FILES.values():
            official(tmp_path / name, lines)
        batch = whole(ListOps(tmp_path).examples("validation"))
        assert [" ".join(words_of(batch, row)) for row in (0, 1)] == ["[MAX 2 [MIN 8 7 ] ]", "[SM 9 4 ]"]
        assert batch["label"].tolist() == [7, 3] == [value(words_of(batch, row)) for row in (0, 1)]

    def test_compressed_files(self, tmp_path):
        official(tmp_path / "plain", ["( ( ( [MED 1 ) 4 ) ] )\t2"], end="\n")
        (tmp_path / "basic_test.tsv.xz").write_bytes(lzma.compress((tmp_path / "plain").read_bytes()))
        assert whole(ListOps(tmp_path).examples("test"))["label"].tolist() == [2]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("( ( [MAX 2 ) 3 )\t3", "line 2: has 1 operators and 0 closing brackets"),
            ("( ( ( [MEAN 2 ) 3 ) ] )\t3", "line 2: '\\[MEAN' is no word"),
            ("( ( ( [MAX 2 ) 3 ) ] )\tthree", "line 2: the value is 'three', but expected is a digit"),
            ("( ( ( [MAX 2 ) 3 ) ] )\t]", "line 2: the value is ']', but expected is a digit"),
            ("( ( ( [MAX 2 ) 3 ) ] )", "line 2: has 1 columns, but expected are 2: Source, Target"),
            ("\t3", "line 2: the expression is empty"),
        ],
    )
    def test_malformed_files_raise(self, tmp_path, line, message):
        official(tmp_path / "basic_test.tsv", [line])
        with pytest.raises(ValueError, match=message):
            ListOps(tmp_path).examples("test")

    def test_empty_and_missing_files_raise(self, tmp_path):
        official(tmp_path / "basic_test.tsv", [])
        with pytest.raises(ValueError, match=r"basic_test.tsv must have expressions, but has none"):
            ListOps(tmp_path).examples("test")
        with pytest.raises(ValueError, match=r"basic_train.tsv.*lra_release.gz"):
            ListOps(tmp_path).examples("train")

    def test_files_have_their_own_lengths(self, tmp_path):
        with pytest.raises(ValueError, match="length must be left out with files"):
            ListOps(tmp_path).examples("test", 400)


def test_the_six_presets_of_the_long_range_arena():
    presets = ListOps.presets
    assert set(presets) == {f"{kind}-{name}" for kind in ("performer", "relu") for name in ("ape", "sine", "conv")}
    for name, preset in presets.items():
        assert preset["attention"] == "linear" and preset["feature_map"] == ("favor" if "performer" in name else "relu")
        assert (preset["layers"], preset["heads"], preset["dim"], preset["hidden"], preset["batch"]) == (6, 8, 512, 2048, 8)
        assert preset["rate"] == pytest.approx(0.0125 / 1000**0.5)
        assert preset.get("redraw", 0) == 0
    assert presets["relu-conv"]["encoding_options"] == {"kernel_size": 128, "realizations": 64, "fixed": True}
    assert presets["relu-sine"]["encoding_options"] == {"sines": 10, "realizations": 64, "fixed": True}
