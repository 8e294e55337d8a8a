"""The tasks of the Long-Range Arena on texts and pictures: their files, samples, models and presets."""

import gzip
import json
import lzma
import sys
from fractions import Fraction
from math import floor
from operator import mul
from types import SimpleNamespace

import pytest
import torch
from PIL import Image as Pillow
from training import losses_of

import lagwise
from lagwise.lab.config import Config, with_fields
from lagwise.lab.tasks.base import SPLITS, Sequences
from lagwise.lab.tasks.files import table_rows
from lagwise.lab.tasks.lra.byte_text import Text
from lagwise.lab.tasks.lra.image import PIXELS, SIDE, Image
from lagwise.lab.tasks.lra.pathfinder import LEVEL, Pathfinder
from lagwise.lab.tasks.lra.retrieval import Retrieval, TwoTowers

TASKS = {"text": Text, "retrieval": Retrieval, "image": Image, "pathfinder": Pathfinder}
NAMES = {"performer-ape", "performer-sine", "performer-conv", "relu-ape", "relu-sine", "relu-conv"}


def config_of(name, **fields):
    return with_fields(Config(task=name), fields)


def tiny(name, **fields):
    return config_of(name, **{"dim": 16, "layers": 1, "heads": 2, "batch": 16, "rate": 1e-2, "encoding": "t5", **fields})


def texts_of(batch):
    """Returns the texts of a batch of bytes."""
    return [bytes(row[:size].tolist()) for row, size in zip(batch["tokens"], batch["lengths"], strict=True)]


def all_of(examples):
    return examples.batch(range(len(examples)))


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_is_fixed_balanced_and_its_splits_are_disjoint(name):
    task, again = TASKS[name](), TASKS[name](seed=5)
    assert task.is_sample
    seen = set()
    for split in SPLITS:
        batch, same = all_of(task.examples(split)), all_of(again.examples(split))
        assert all(torch.equal(batch[column], same[column]) for column in batch)
        counts = batch["label"].bincount(minlength=task.classes)
        assert counts.min() == counts.max() > 0
        assert batch["tokens"].dtype == torch.int64 and batch["tokens"].max() < 256
        own = {tuple(row.flatten().tolist()) for row in batch["tokens"]}
        assert not own & seen
        seen |= own


@pytest.mark.parametrize("name", TASKS)
def test_thirty_steps_lower_the_loss_of_the_sample(name):
    # Softmax attention over all pixels would take a second for each step.
    linear = {"attention": "linear", "feature_map": "relu", "encoding": "sinusoidal"}
    losses = losses_of(TASKS[name](), tiny(name, **linear), 30)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


@pytest.mark.parametrize("name", TASKS)
def test_presets_are_the_papers_and_make_models(name):
    task = TASKS[name]
    assert set(task.presets) == NAMES
    for preset in task.presets.values():
        config = config_of(name, **preset)
        assert config.attention == "linear"
        lagwise.make(config.encoding, heads=config.heads, head_dim=config.head_dim or config.dim // config.heads, dim=config.dim,
                     **config.encoding_options)  # fmt: skip
    config_of(name, **task.defaults)


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("preset", ["performer-sine", "relu-conv", "relu-ape"])
def test_a_small_model_of_a_preset_has_a_score_for_each_class(name, preset):
    task = TASKS[name]()
    fields = {**task.presets[preset], "dim": 16, "heads": 2, "head_dim": 8, "hidden": 16, "layers": 1}
    model, batch = task.model(config_of(name, **fields)), task.examples("test").batch([3, 0])
    assert model(batch).shape == (2, task.classes)


def test_presets_have_the_sizes_of_the_table():
    def values(task, preset, *fields):
        return [task.presets[preset][field] for field in fields]

    sizes = ("layers", "heads", "dim", "hidden", "batch", "steps", "warmup", "schedule", "weight_decay", "dropout")
    assert values(Text, "relu-sine", *sizes) == [4, 4, 256, 1024, 8, 30_000, 8000, "rsqrt", 0.1, 0.1]
    assert values(Retrieval, "relu-sine", *sizes) == [4, 4, 128, 512, 8, 15_000, 3000, "rsqrt", 0.1, 0.1]
    # 200 epochs of 468 steps, the first of which is the warm-up.
    assert values(Image, "relu-sine", *sizes) == [1, 8, 128, 128, 96, 93_600, 468, "cosine", 0.0, 0.3]
    assert Image.presets["relu-conv"]["head_dim"] * 8 == 64 and Image.presets["relu-conv"]["rate"] == 2.5e-4
    assert values(Text, "performer-ape", "batch", "rate") == [16, pytest.approx(0.025 / 8000**0.5)]
    assert values(Text, "performer-sine", "batch", "rate") == [8, pytest.approx(0.0125 / 8000**0.5)]
    assert Retrieval.presets["relu-ape"]["rate"] == pytest.approx(0.005 / 3000**0.5)
    assert Retrieval.presets["relu-ape"]["task_options"] == {"length": 4000}


@pytest.mark.parametrize("task", TASKS.values())
def test_encodings_get_the_published_options(task):
    realizations = 64 if task in (Text, Retrieval) else 32
    assert task().encoding_options("sine-spe") == {"sines": 10, "realizations": realizations}
    assert task().encoding_options("conv-spe") == {"kernel_size": 128, "realizations": realizations}
    assert task().encoding_options("alibi") == {}


def test_a_learned_table_has_a_place_for_each_token_and_the_vector_before_them():
    assert Text(length=77).encoding_options("learned") == {"length": 78}
    assert Retrieval(length=50).encoding_options("learned") == {"length": 51}
    assert Image().encoding_options("learned") == Pathfinder().encoding_options("learned") == {"length": 1025}


def test_accuracy_and_loss_of_known_scores():
    task = Text()
    metric = task.metrics()[task.facts.metric]
    scores, batch = torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 1.0], [0.0, 0.0]]), {"label": torch.tensor([0, 1, 1, 0])}
    metric.update(*task.answers(scores, batch))
    assert metric.compute() == 0.75
    total, count = task.loss(scores, batch)
    expected = 2 * torch.log1p(torch.tensor(-2.0).exp()) + torch.log1p(torch.tensor(2.0).exp()) + torch.tensor(2.0).log()
    torch.testing.assert_close(total, expected)
    assert count == 4


def test_padded_texts_are_whole_slices():
    examples = Sequences(torch.tensor([5, 6, 7, 8, 9], dtype=torch.uint8), torch.tensor([2, 5]), padding=1, max_length=2)
    batch = examples.batch([1, 0])
    assert batch["tokens"].tolist() == [[7, 8], [5, 6]] and batch["lengths"].tolist() == [2, 2]
    longer = Sequences(examples.tokens, torch.tensor([2, 5]), padding=1).batch([0, 1])
    assert longer["tokens"].tolist() == [[5, 6, 1], [7, 8, 9]] and longer["tokens"].dtype == torch.int64


REVIEWS = [(index % 2, f"review number {index}, of class {index % 2} é") for index in range(20)]


def tsv(reviews):
    return "label\tid\ttext\n" + "".join(f"{label}\t{index}\t{text}\n" for index, (label, text) in enumerate(reviews))


def check_reviews(task):
    """Checks that the training reviews are in two splits, each once, with their own labels."""
    train, validation, test = (all_of(task.examples(split)) for split in SPLITS)
    assert len(validation["label"]) == 4 and len(train["label"]) == 16
    found = [*texts_of(train), *texts_of(validation)]
    assert sorted(found) == sorted(text.encode() for _, text in REVIEWS)
    labels = torch.cat([train["label"], validation["label"]]).tolist()
    assert [int(text[-4:-3]) for text in found] == labels
    assert sorted(texts_of(test)) == [b"bad", b"good"]


@pytest.mark.parametrize("opener, ending", [(open, ""), (lzma.open, ".xz"), (gzip.open, ".gz")])
def test_reviews_of_tables(tmp_path, opener, ending):
    for part, reviews in (("train", REVIEWS), ("test", [(1, "good"), (0, "bad")])):
        with opener(tmp_path / f"{part}.tsv{ending}", "wt", encoding="utf-8") as file:
            file.write(tsv(reviews))
    check_reviews(Text(tmp_path, validation=4))


def test_reviews_of_the_official_folders(tmp_path):
    for part, reviews in (("train", REVIEWS), ("test", [(1, "good"), (0, "bad")])):
        for index, (label, text) in enumerate(reviews):
            folder = tmp_path / part / ("neg", "pos")[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index}_7.txt").write_text(text, encoding="utf-8")
    check_reviews(Text(tmp_path, validation=4))
    for path in (tmp_path / "test" / "pos").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match=r"pos, but there is no \.txt file: .*stanford"):
        Text(tmp_path).examples("test")


def test_reviews_of_the_hub(monkeypatch):
    parts = {"train": REVIEWS, "test": [(1, "good"), (0, "bad")]}
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return {"text": [text for _, text in parts[split]], "label": [label for label, _ in parts[split]]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    check_reviews(Text("hub", validation=4))
    assert asked == [("stanfordnlp/imdb", "train"), ("stanfordnlp/imdb", "test")]


def test_the_hub_without_its_package_or_without_the_task(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"datasets must be there for data='hub', but is not: pip install"):
        Text("hub").examples("train")
    with pytest.raises(ValueError, match="not on the Hub"):
        Retrieval("hub")


def test_texts_are_cut_and_can_be_read_further(tmp_path):
    (tmp_path / "test.tsv").write_text("0\ta\tabcdef\n1\tb\txy\n")
    task = Text(tmp_path, length=3)
    assert sorted(texts_of(all_of(task.examples("test")))) == [b"abc", b"xy"]
    assert sorted(texts_of(all_of(task.examples("test", length=5)))) == [b"abcde", b"xy"]


@pytest.mark.parametrize(
    "table, words",
    [
        ("label\tid\ttext\n2\t0\ta\n", r"test\.tsv, line 2: the label is '2', but expected is 0 or 1"),
        ("1\t0\ta\n1\tonly two\n", r"test\.tsv, line 2: has 2 columns, but expected are 3: label, id, text"),
        ("1\t0\t\n", r"test\.tsv, line 1: the text is empty"),
    ],
)
def test_wrong_lines_of_reviews_are_named(tmp_path, table, words):
    (tmp_path / "test.tsv").write_text(table)
    with pytest.raises(ValueError, match=words):
        Text(tmp_path).examples("test")


def test_missing_reviews_and_wrong_options(tmp_path):
    with pytest.raises(ValueError, match=r"test\.tsv.*has none: .*stanford"):
        Text(tmp_path).examples("test")
    (tmp_path / "train.tsv").write_text(tsv(REVIEWS))
    with pytest.raises(ValueError, match="validation must be less than the number of training texts, 20, but is 2500"):
        Text(tmp_path).examples("train")
    with pytest.raises(ValueError, match="length must be a whole number of at least 1"):
        Text(length=0)
    with pytest.raises(ValueError, match="did you mean 'length'"):
        Text(lenght=5)


def test_a_cut_archive_is_named(tmp_path):
    whole = lzma.compress(tsv(REVIEWS).encode())
    (tmp_path / "test.tsv.xz").write_bytes(whole[:-20])
    with pytest.raises(ValueError, match=r"test\.tsv\.xz must be a whole compressed file"):
        list(table_rows(tmp_path / "test.tsv.xz", "label", "id", "text"))


def test_pairs_of_the_official_files(tmp_path):
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("1.0\tA\tB\tfirst\tsecond\n0.0\tB\tC\tsecond\tthird one\n")
    task = Retrieval(tmp_path)
    batch = all_of(task.examples("validation"))
    assert batch["tokens"].shape == (2, 2, 9) and task.tokens(batch) == 5 + 6 + 6 + 9
    found = {
        tuple(bytes(row[:size].tolist()) for row, size in zip(tokens, sizes, strict=True)): int(label)
        for tokens, sizes, label in zip(batch["tokens"], batch["lengths"], batch["label"], strict=True)
    }
    assert found == {(b"first", b"second"): 1, (b"second", b"third one"): 0}
    assert task.examples("validation").documents.tokens.numel() == 5 + 6 + 9, "each document is kept once"
    assert all_of(task.examples("validation", length=4))["tokens"].shape == (2, 2, 4)


def test_pairs_of_the_substitute_come_with_a_warning(tmp_path):
    with lzma.open(tmp_path / "docs.tsv.xz", "wt") as file:
        file.write("7\tTitle\tfirst\n9\tOther\tsecond\n")
    (tmp_path / "pairs.test.tsv").write_text("1\t9\t7\n")
    with pytest.warns(UserWarning, match="SUBSTITUTE"):
        batch = all_of(Retrieval(tmp_path).examples("test"))
    assert texts_of({name: batch[name][0] for name in ("tokens", "lengths")}) == [b"second", b"first"]
    assert "SUBSTITUTE" in Retrieval.facts.source


@pytest.mark.parametrize(
    "name, table, words",
    [
        ("new_aan_pairs.test.tsv", "1\ta\tb\ttext\n", r"line 1: has 4 columns, but expected are 5"),
        ("new_aan_pairs.test.tsv", "x\ta\tb\tc\td\n", r"new_aan_pairs\.test\.tsv, line 1: the label is 'x'"),
        ("new_aan_pairs.test.tsv", "1\ta\tb\tc\t\n", r"line 1: the text is empty"),
        ("new_aan_pairs.train.tsv", "1\ta\tb\tc\td\n", r"new_aan_pairs\.test\.tsv.*has none: .*long-range-arena"),
    ],
)
def test_wrong_pairs_are_named(tmp_path, name, table, words):
    (tmp_path / name).write_text(table)
    with pytest.raises(ValueError, match=words):
        Retrieval(tmp_path).examples("test")


@pytest.mark.filterwarnings("ignore:.*SUBSTITUTE")
@pytest.mark.parametrize(
    "documents, pairs, words",
    [
        ("1\tA\ta\n", "1\t1\t2\n", r"pairs\.test\.tsv, line 1: the id 2 is unknown"),
        ("1\tA\ta\n1\tB\tb\n", "1\t1\t1\n", r"docs\.tsv, line 2: the id 1 was there before"),
    ],
)
def test_wrong_pairs_of_the_substitute_are_named(tmp_path, documents, pairs, words):
    (tmp_path / "docs.tsv").write_text(documents)
    (tmp_path / "pairs.test.tsv").write_text(pairs)
    with pytest.raises(ValueError, match=words):
        Retrieval(tmp_path).examples("test")


def test_the_head_of_two_towers_sees_both_their_product_and_their_difference():
    model = TwoTowers(tiny("retrieval", encoding="none"), classes=2).eval()
    seen = []
    model.choice.register_forward_hook(lambda module, inputs, outputs: seen.append(inputs[0]))
    batch = Retrieval().examples("train").batch([0, 1, 2])
    model(batch)
    x, y = (model.pooled({name: batch[name][:, side] for name in ("tokens", "lengths")}) for side in (0, 1))
    torch.testing.assert_close(seen[0], torch.cat([x, y, x * y, x - y], dim=-1))


def test_documents_are_read_by_a_first_vector_or_by_their_mean():
    config = tiny("retrieval", encoding="none")
    first, mean = Retrieval().model(config), Retrieval(pooling="mean").model(config).eval()
    assert first.first is not None and mean.first is None
    batch = {name: column[:, 0] for name, column in Retrieval().examples("train").batch([0, 1]).items() if name != "label"}
    vectors = mean.encoder(mean.embedding(batch["tokens"]), lengths=batch["lengths"])
    expected = torch.stack([row[:length].mean(0) for row, length in zip(vectors, batch["lengths"], strict=True)])
    torch.testing.assert_close(mean.pooled(batch), expected)
    with pytest.raises(ValueError, match="pooling must be one of mean, last, first, but is 'max'"):
        Retrieval(pooling="max")


def colours_of(count):
    return torch.randint(256, (count, 3, PIXELS), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def grey_of(colours):
    """Returns the brightness of each pixel, half a step rounded up."""
    shares = [Fraction(share) for share in ("0.2989", "0.5870", "0.1140")]
    return [
        [floor(sum(map(mul, shares, pixel)) + Fraction(1, 2)) for pixel in zip(*image.tolist(), strict=True)] for image in colours
    ]


def test_pictures_of_the_binary_version(tmp_path):
    for number in range(1, 6):
        colours = colours_of(2)
        records = torch.cat([torch.tensor([[number], [9]], dtype=torch.uint8), colours.flatten(1)], dim=1)
        (tmp_path / f"data_batch_{number}.bin").write_bytes(bytes(records.flatten().tolist()))
    task = Image(tmp_path)
    train, validation = all_of(task.examples("train")), all_of(task.examples("validation"))
    assert train["label"].tolist() == [1, 9, 2, 9, 3, 9, 4, 9, 5] and validation["label"].tolist() == [9]
    assert train["tokens"][:2].tolist() == grey_of(colours_of(2))
    with pytest.raises(ValueError, match=r"test_batch\.bin, but .*kriz"):
        task.examples("test")
    with pytest.raises(ValueError, match="length must be 1024, the number of pixels, but is 2048"):
        task.examples("train", length=2048)


def test_pictures_of_sheets(tmp_path):
    colours = colours_of(3)
    sheet = colours.movedim(1, -1).contiguous()
    Pillow.frombytes("RGB", (PIXELS, 3), bytes(sheet.flatten().tolist())).save(tmp_path / "test_batch.png")
    with pytest.raises(ValueError, match=r"test_lables\.json"):
        Image(tmp_path).examples("test")
    (tmp_path / "test_lables.json").write_text(json.dumps([3, 0, 8]))
    batch = all_of(Image(tmp_path).examples("test"))
    assert batch["tokens"].tolist() == grey_of(colours) and batch["label"].tolist() == [3, 0, 8]
    (tmp_path / "test_lables.json").write_text(json.dumps([3, 0]))
    with pytest.raises(ValueError, match="has 2 labels, but expected is one for each of the 3 pictures"):
        Image(tmp_path).examples("test")


def test_sheets_may_be_grey_and_have_pictures_below_each_other(tmp_path):
    values = torch.arange(2 * PIXELS).view(2, PIXELS) % 256
    Pillow.frombytes("L", (SIDE, 2 * SIDE), bytes(values.flatten().tolist())).save(tmp_path / "test_batch.png")
    (tmp_path / "test_lables.json").write_text("[7, 1]")
    batch = all_of(Image(tmp_path).examples("test"))
    assert torch.equal(batch["tokens"], values) and batch["label"].tolist() == [7, 1]
    Pillow.new("L", (SIDE, 40)).save(tmp_path / "test_batch.png")
    with pytest.raises(
        ValueError, match=r"test_batch\.png: has 40 rows of 32 pixels, but expected is a picture in each row of 1024"
    ):
        Image(tmp_path).examples("test")


def test_pictures_of_the_hub(monkeypatch):
    colours = colours_of(2)
    images = [Pillow.frombytes("RGB", (32, 32), bytes(image.T.flatten().tolist())) for image in colours]
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return {"img": images, "label": [4, 7]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    batch = all_of(Image("hub").examples("test"))
    assert asked == [("uoft-cs/cifar10", "test")]
    assert batch["tokens"].tolist() == grey_of(colours) and batch["label"].tolist() == [4, 7]


def test_wrong_files_of_pictures_are_named(tmp_path):
    path = tmp_path / "test_batch.bin"
    path.write_bytes(bytes(3072))
    with pytest.raises(ValueError, match=r"test_batch\.bin: has 3072 bytes, but expected are 3073 for each picture"):
        Image(tmp_path).examples("test")
    path.write_bytes(bytes(3073) + bytes([10]) + bytes(3072))
    with pytest.raises(ValueError, match=r"test_batch\.bin, picture 2: the label is 10, but expected is one from 0 to 9"):
        Image(tmp_path).examples("test")
    path.rename(tmp_path / "test_batch")
    with pytest.raises(ValueError, match="the pickled test_batch is not read"):
        Image(tmp_path).examples("test")


@pytest.mark.parametrize("task", [Image, Pathfinder])
def test_a_grid_goes_to_the_encoding_and_no_vector_before_the_pixels_moves_it(task):
    name = "image" if task is Image else "pathfinder"
    options = task(grid=True).encoding_options("conv-spe")
    assert options["grid"] == (32,) and options["kernel_size"] == 16
    small = {**options, "kernel_size": 2, "realizations": 4}
    fields = {"attention": "linear", "feature_map": "relu", "encoding": "conv-spe", "encoding_options": small}
    model = task(grid=True).model(tiny(name, **fields))
    assert model.pooling == "mean" and model.encoder(torch.randn(1, PIXELS, 16)).shape == (1, PIXELS, 16)
    assert "grid" not in task(grid=True).encoding_options("sine-spe")


def write_level(folder, count, *, empty=()):
    """Writes pictures as the release has them: number n is bright by n, and odd ones have the label 1."""
    (folder / "metadata").mkdir(parents=True)
    for index in range(count):
        part = index // 5
        images = folder / "imgs" / str(part)
        images.mkdir(parents=True, exist_ok=True)
        path = images / f"sample_{index}.png"
        if index in empty:
            path.write_bytes(b"")
        else:
            Pillow.new("L", (32, 32), index).save(path)
        with open(folder / "metadata" / f"{part}.npy", "a") as file:
            file.write(f"imgs/{part} sample_{index}.png {index} {index % 2} 1.8 14 rest\n")


@pytest.mark.parametrize("above", ["pathfinder32", ""])
def test_pictures_of_the_release(tmp_path, above):
    write_level(tmp_path / above / LEVEL, 20)
    batches = [all_of(Pathfinder(tmp_path).examples(split)) for split in SPLITS]
    assert [len(batch["label"]) for batch in batches] == [16, 2, 2]
    tokens, labels = (torch.cat([batch[name] for batch in batches]) for name in ("tokens", "label"))
    assert sorted(tokens[:, 0].tolist()) == list(range(20)) and torch.equal(tokens[:, 0] % 2, labels)
    assert torch.equal(tokens, tokens[:, :1].expand(-1, PIXELS))
    assert tokens[:, 0].tolist() != list(range(20)), "classes and files are mixed"


def test_empty_pictures_are_left_out_with_a_warning(tmp_path):
    write_level(tmp_path / LEVEL, 10, empty=(4,))
    with pytest.warns(UserWarning, match="has 1 empty files, which are left out"):
        task = Pathfinder(tmp_path)
        task.examples("train")
    assert sum(len(task.examples(split)) for split in SPLITS) == 9


@pytest.mark.parametrize(
    "line, words",
    [
        ("imgs/0 sample_0.png 0\n", r"0\.npy, line 2: has 3 words"),
        ("imgs/0 sample_0.png 0 2\n", r"0\.npy, line 2: the label is '2'"),
        ("imgs/0 gone.png 0 1\n", r"0\.npy, line 2: names .*gone\.png, which is missing"),
        ("imgs/0 small.png 0 1\n", r"small\.png must have 32 x 32 pixels, but has 4 x 3"),
        ("imgs/0 text.png 0 1\n", r"text\.png must be a picture, but cannot be read"),
    ],
)
def test_wrong_lines_of_the_release_are_named(tmp_path, line, words):
    level = tmp_path / LEVEL
    write_level(level, 1)
    Pillow.new("L", (4, 3)).save(level / "imgs" / "0" / "small.png")
    (level / "imgs" / "0" / "text.png").write_text("no picture")
    with open(level / "metadata" / "0.npy", "a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=words):
        Pathfinder(tmp_path).examples("train")


def test_pictures_of_arrays_keep_their_splits(tmp_path):
    numpy = pytest.importorskip("numpy")
    image = numpy.arange(4, dtype=numpy.uint8)[:, None, None] * numpy.ones((1, 32, 32), numpy.uint8)
    split, label = numpy.array(["train", "val", "test", "train"]), numpy.array([0, 1, 1, 0], numpy.uint8)
    numpy.savez(tmp_path / "any.npz", image=image, label=label, split=split)
    batches = {name: all_of(Pathfinder(tmp_path).examples(name)) for name in SPLITS}
    assert {name: (batch["tokens"][:, 5].tolist(), batch["label"].tolist()) for name, batch in batches.items()} == {
        "train": ([0, 3], [0, 0]), "validation": ([1], [1]), "test": ([2], [1]),
    }  # fmt: skip
    numpy.savez(tmp_path / "any.npz", image=image, label=label + 1, split=split)
    with pytest.raises(ValueError, match="must have labels 0 and 1"):
        Pathfinder(tmp_path).examples("test")
    numpy.savez(tmp_path / "any.npz", image=image[:3], label=label, split=split)
    with pytest.raises(ValueError, match=r"pictures \[number, 32, 32\]"):
        Pathfinder(tmp_path).examples("test")
    numpy.savez(tmp_path / "any.npz", image=image, label=label)
    with pytest.raises(ValueError, match="has no split"):
        Pathfinder(tmp_path).examples("test")
    (tmp_path / "any.npz").unlink()
    with pytest.raises(ValueError, match=r"pathfinder32/.*has 0 \.npz files: .*long-range-arena"):
        Pathfinder(tmp_path).examples("test")


def test_the_line_of_the_sample_is_broken_in_one_class_alone():
    batch = all_of(Pathfinder().examples("train"))
    columns = (batch["tokens"].view(-1, 32, 32) > 0).any(1)
    assert columns[:, [3, 28]].all() and not columns[:, [2, 29]].any()
    assert columns[batch["label"] == 1][:, 3:29].all() and not columns[batch["label"] == 0][:, 8:24].any()
