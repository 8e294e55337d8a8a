"""Language modelling: texts, packing, masks, metrics, generation, and the command line."""

import gzip
import json
import lzma
import math
from types import SimpleNamespace

import pytest
import torch
from training import losses_of, random_bert
from typer.testing import CliRunner

from lagwise.lab.checkpoint import load_latest
from lagwise.lab.cli import app
from lagwise.lab.config import Config, with_fields
from lagwise.lab.experiment import make_config
from lagwise.lab.loop import Session, Settings
from lagwise.lab.run import train
from lagwise.lab.run_folder import Run
from lagwise.lab.tasks.base import SPLITS, Sampling
from lagwise.lab.tasks.generation import draw_tokens, generate_tokens
from lagwise.lab.tasks.models import CausalModel
from lagwise.lab.tasks.text.corpora import documents_of
from lagwise.lab.tasks.text.lm import LanguageModel
from lagwise.lab.tasks.text.streams import BYTE_END, BYTE_MASK
from lagwise.lab.tasks.token_prediction import BitsPerByte, Perplexity, mean_loss_by_position

SMALL = {"dim": 32, "layers": 2, "heads": 2, "batch": 8, "rate": 1e-2, "encoding": "rotary"}
BERT = {"model": "hf", "path": "bert", "objective": "masked", "tokens": "wordpiece", "packed": False}
CPU = Settings(device="cpu", report_every=5)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path / "cache"))


def config_of(**fields):
    return with_fields(Config("lm"), {**SMALL, **fields})


def model_of(task, **fields):
    torch.manual_seed(0)
    return task.model(config_of(**fields)).eval()


def some(task, split="test", count=4, length=None):
    return task.examples(split, length).batch(range(count))


@pytest.mark.parametrize("text", ["a b\n\nc\n\n\nd", "= One =\nx\n\ny\n= Two =\n= = part = =\nz\n"])
def test_unpacked_documents_make_the_text_again(text):
    assert "".join(documents_of(text, packed=False)) == text


def test_titles_begin_documents_and_sections_and_blank_lines_do_not():
    text = " = One = \nx\n\ny\n = = part = = \nz\n = Two = \nw\n"
    assert documents_of(text, packed=True) == [" = One = \nx\n\ny\n = = part = = \nz", " = Two = \nw"]


@pytest.mark.parametrize("tokens", ["bytes", "bpe", "wordpiece"])
@pytest.mark.parametrize("packed", [True, False])
def test_sizes_add_up_to_the_bytes_of_the_text(tokens, packed):
    vocabulary = {} if tokens == "bytes" else {"vocabulary": 400}
    task = LanguageModel(tokens=tokens, packed=packed, **vocabulary)
    task.pieces["test"][0] = "Zoë  said [SEP] to 東京 \t "
    stream = task.stream("test")
    sizes = (stream.tokens != BYTE_END) if stream.sizes is None else stream.sizes
    assert int(sizes.sum()) == sum(len(piece.encode()) for piece in task.pieces["test"])
    assert int((stream.tokens == task.alphabet.end).sum()) == (len(task.pieces["test"]) + 1 if packed else 2)


def test_every_token_is_a_target_once():
    task = LanguageModel(length=32)
    examples = task.examples("validation")
    batch = examples.batch(range(len(examples)))
    stream = task.stream("validation").tokens.long()
    assert torch.equal(batch["targets"].flatten(), stream[1 : 1 + batch["targets"].numel()])
    assert len(stream) - 1 - batch["targets"].numel() < 32


@pytest.mark.parametrize("objective", ["causal", "masked"])
@pytest.mark.parametrize("fields", [{}, {"attention": "linear", "feature_map": "relu", "encoding": "sine-spe"}])
def test_nothing_attends_across_documents(objective, fields):
    task = LanguageModel(length=96, objective=objective)
    model, batch = model_of(task, **fields), some(task, count=8)
    ends = batch["cu_seqlens"].tolist()
    rows = set(range(0, batch["tokens"].numel() + 1, 96))
    assert rows < set(ends)
    # A document that begins inside a row.
    place = next(place for place, end in enumerate(ends) if end not in rows)
    first, last = ends[place], ends[place + 1]
    other = {**batch, "tokens": batch["tokens"].clone()}
    other["tokens"].view(-1)[first + 1] = ord("#")
    before, after = model.hidden(batch).flatten(0, 1), model.hidden(other).flatten(0, 1)
    same = (before == after).all(1)
    assert same[:first].all() and same[last:].all() and not same[first + 1]


def test_positions_begin_anew_with_each_document():
    task = LanguageModel(length=96)
    batch = some(task)
    for start, stop in zip(batch["cu_seqlens"], batch["cu_seqlens"][1:], strict=False):
        assert batch["positions"].flatten()[start:stop].tolist() == list(range(stop - start))
    model = model_of(task)
    start, stop = batch["cu_seqlens"][3:5].tolist()
    alone = model({"tokens": batch["tokens"].view(1, -1)[:, start:stop]})[0]
    assert torch.allclose(model(batch).flatten(0, 1)[start:stop], alone, atol=1e-5)


def originals(task, count, split="train"):
    return torch.stack([task.stream(split).tokens[row * task.options.length :][: task.options.length] for row in range(count)])


def test_masks_are_eighty_ten_ten_of_fifteen_percent():
    task = LanguageModel(length=128, objective="masked")
    count = task.examples("train").count
    batch, tokens = some(task, "train", count), originals(task, count).long()
    chosen, inputs = batch["chosen"], batch["tokens"].flatten()
    assert torch.equal(batch["targets"], tokens.flatten()[chosen])
    ordinary = int((tokens != BYTE_END).sum())
    assert len(chosen) / ordinary == pytest.approx(0.15, abs=0.01)
    masked = inputs[chosen] == BYTE_MASK
    kept = inputs[chosen] == batch["targets"]
    assert float(masked.float().mean()) == pytest.approx(0.8, abs=0.02)
    assert float(kept.float().mean()) == pytest.approx(0.1, abs=0.02)
    untouched = torch.ones_like(inputs, dtype=torch.bool)
    untouched[chosen] = False
    assert torch.equal(inputs[untouched], tokens.flatten()[untouched]) and not (batch["targets"] == BYTE_END).any()


def test_training_rows_have_several_masks_that_are_always_the_same():
    task = LanguageModel(length=64, objective="masked")
    examples = task.examples("train")
    first, again, copy = (examples.batch([index]) for index in (0, 0, examples.count))
    assert torch.equal(first["tokens"], again["tokens"]) and not torch.equal(first["chosen"], copy["chosen"])
    other = LanguageModel(seed=1, length=64, objective="masked").examples("train").batch([0])
    assert not torch.equal(first["chosen"], other["chosen"])


@pytest.mark.parametrize("tokens", ["bytes", "bpe", "wordpiece"])
def test_whole_words_are_asked_for_as_a_whole(tokens):
    vocabulary = {} if tokens == "bytes" else {"vocabulary": {"bpe": 300, "wordpiece": 90}[tokens]}
    task = LanguageModel(tokens=tokens, objective="masked", whole_words=True, length=64, **vocabulary)
    examples = task.examples("train")
    batch = examples.batch(range(20))
    tokens = originals(task, 20).long()
    asked = torch.zeros(tokens.numel(), dtype=torch.bool)
    asked[batch["chosen"]] = True
    first = examples.first_of_word(tokens)
    assert torch.equal(asked.view_as(tokens), asked.view_as(tokens).gather(1, first))
    assert int((first != torch.arange(64)).sum()) > 100


def test_words_of_bytes():
    task = LanguageModel(objective="masked", whole_words=True, length=16)
    tokens = torch.tensor([list(b"(one, two)")])
    assert task.examples("train").first_of_word(tokens).tolist() == [[0, 1, 1, 1, 4, 5, 6, 6, 6, 9]]


def test_bits_per_byte_and_perplexity_by_hand():
    losses, sizes = torch.tensor([math.log(2.0), math.log(8.0)]), torch.tensor([1, 3])
    bits, perplexity = BitsPerByte(), Perplexity()
    for metric in (bits, perplexity):
        metric.update(losses[:1], sizes[:1])
        metric.update(losses[1:], sizes[1:])
    assert float(bits.compute()) == pytest.approx(1.0) and float(perplexity.compute()) == pytest.approx(4.0)
    assert bits.higher_is_better is False and perplexity.higher_is_better is False


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"encoding": "t5"},
        {"encoding": "sinusoidal"},
        {"attention": "linear", "feature_map": "relu", "encoding": "sine-spe"},
        {"attention": "linear", "feature_map": "favor", "encoding": "none"},
    ],
)
def test_generation_equals_teacher_forcing(fields, monkeypatch):
    model = model_of(LanguageModel(), **fields)
    seen, step = [], model.step
    monkeypatch.setattr(model, "step", lambda *given: seen.append(step(*given)) or seen[-1])
    prompts = torch.randint(256, (3, 5))
    found = generate_tokens(model, prompts, Sampling(length=30, temperature=0.0))
    whole = model({"tokens": found.tokens})[:, 4:-1]
    assert torch.allclose(torch.stack(seen, dim=1), whole, atol=1e-4)
    assert torch.equal(whole.argmax(2), found.tokens[:, 5:]) and torch.equal(found.tokens[:, :5], prompts)
    assert torch.allclose(whole.log_softmax(2).amax(2), found.log_probabilities, atol=1e-4)


def test_generation_is_a_function_of_the_seed():
    model, prompts = model_of(LanguageModel()), torch.full((2, 1), BYTE_END)
    first, again, other = (generate_tokens(model, prompts, Sampling(length=20, seed=seed)).tokens for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first[0], first[1])


def test_invalid_tokens_are_never_drawn_and_rows_end():
    model, prompts = model_of(LanguageModel()), torch.full((4, 1), BYTE_END)
    odd = torch.arange(256) % 2 == 1
    seen = []

    def allowed(tokens):
        seen.append(tokens.shape[1])
        return odd.expand(len(tokens), -1)

    tokens = generate_tokens(model, prompts, Sampling(length=40), allowed=allowed).tokens
    assert bool((tokens % 2 == 1).all()) and seen == list(range(1, 40))

    def ending(tokens):
        return torch.arange(256).expand(len(tokens), -1) == (253 if tokens.shape[1] > 5 else 7)

    found = generate_tokens(model, prompts, Sampling(length=40), allowed=ending, end=253)
    assert found.tokens.tolist() == [[BYTE_END, 7, 7, 7, 7, 7, 253]] * 4

    def first_row_ends(tokens):
        wanted = torch.where(torch.arange(4) == 0, 253, 7)
        return torch.arange(256) == wanted[:, None]

    found = generate_tokens(model, prompts, Sampling(length=6), allowed=first_row_ends, end=253)
    assert found.tokens[0].tolist() == [BYTE_END, *[253] * 5] and found.tokens[1].tolist() == [BYTE_END, *[7] * 5]
    with pytest.raises(ValueError, match="allowed must leave at least one token"):
        generate_tokens(model, prompts, Sampling(length=4), allowed=lambda x: torch.zeros(4, 256, dtype=torch.bool))


def test_the_nucleus_and_the_temperature():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().expand(4000, -1)
    draws = torch.Generator().manual_seed(0)
    shares = draw_tokens(scores, Sampling(nucleus=0.7), draws).bincount(minlength=4) / 4000
    assert shares[2:].tolist() == [0.0, 0.0] and float(shares[0]) == pytest.approx(0.625, abs=0.03)
    shares = draw_tokens(scores, Sampling(temperature=0.5), draws).bincount(minlength=4) / 4000
    assert float(shares[0]) == pytest.approx(0.25 / 0.365, abs=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1}, "length must be more than the 1 tokens of the prompt"),
        ({"temperature": -1.0}, "temperature must be at least 0, but is -1.0"),
        ({"nucleus": 0.0}, "nucleus must be above 0 and at most 1, but is 0.0"),
    ],
)
def test_sampling_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        generate_tokens(model_of(LanguageModel()), torch.zeros(1, 1, dtype=torch.int64), Sampling(**changes))


@pytest.mark.parametrize(
    "options", [{}, {"packed": False}, {"objective": "masked"}, {"tokens": "bpe", "vocabulary": 300, "tied": False}]
)
def test_thirty_steps_lower_the_loss(options):
    losses = losses_of(LanguageModel(length=64, **options), config_of(), 30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_loss_against_position():
    task = LanguageModel(length=32, packed=False)
    model, examples = model_of(task), task.examples("test", 64)
    found = mean_loss_by_position(model, examples, examples.length, 4)
    assert [each.first for each in found] == [0, 16, 32, 48] and {each.tokens for each in found} == {16 * len(examples)}
    batch = examples.batch(range(len(examples)))
    with torch.no_grad():
        total, count = task.loss(model(batch), batch)
    assert sum(each.nats * each.tokens for each in found) / int(count) == pytest.approx(float(total / count), rel=1e-5)


def test_longer_rows_and_a_text_that_is_too_short():
    task = LanguageModel(length=32)
    assert [some(task, length=32 * factor, count=1)["tokens"].shape[1] for factor in (1, 2, 4, 8)] == [32, 64, 128, 256]
    with pytest.raises(ValueError, match=r"length must be less than the .* tokens of the test text, but is 1000000"):
        task.examples("test", 1_000_000)


@pytest.mark.parametrize("ending", ["", ".xz", ".gz"])
def test_texts_are_read_and_the_last_documents_are_kept(tmp_path, ending):
    opened = {"": open, ".xz": lzma.open, ".gz": gzip.open}[ending]
    with opened(tmp_path / f"all.txt{ending}", "wb") as file:
        file.write("\n\n".join(f"document {number:02d}" for number in range(20)).encode())
    task = LanguageModel(tmp_path, validation=0.1, test=0.2)
    assert [len(task.pieces[split]) for split in SPLITS] == [14, 2, 4] and task.pieces["test"][-1] == "document 19"
    assert not task.is_sample


def test_files_of_splits(tmp_path):
    for split in SPLITS:
        (tmp_path / f"{split}.txt").write_text(f"{split} one\n\n{split} two")
    assert LanguageModel(tmp_path).pieces == {split: [f"{split} one", f"{split} two"] for split in SPLITS}
    (tmp_path / "test.txt").unlink()
    with pytest.raises(ValueError, match=r"data must be a folder with test\.txt"):
        LanguageModel(tmp_path).examples("train")


def test_what_is_wrong_with_files(tmp_path):
    with pytest.raises(ValueError, match=r"data must be a folder with \.txt files, .* has none"):
        LanguageModel(tmp_path).examples("train")
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(ValueError, match=r"a\.txt, line 2: byte 0xff is no UTF-8, but expected is UTF-8 text"):
        LanguageModel(tmp_path).examples("train")
    path.write_text("a single document")
    with pytest.raises(ValueError, match="the text must have documents for all splits, but 1 leave none for"):
        LanguageModel(tmp_path).examples("train")
    path.unlink()
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(b"text " * 100)[:-9])
    with pytest.raises(ValueError, match=r"b\.txt\.xz must be a whole compressed file"):
        LanguageModel(tmp_path).examples("train")


def test_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return {"text": [" = A = \n", "\n", f" {split} . \n", " = B = \n", " more . \n"]}

    monkeypatch.setitem(__import__("sys").modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = LanguageModel("hub", length=4)
    assert task.pieces["test"] == [" = A = \n\n test . ", " = B = \n more . "]
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1", split) for split in SPLITS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": "words"}, "tokens must be one of bytes, bpe, wordpiece, but is 'words'"),
        ({"vocabulary": 300}, "vocabulary must be left out with tokens='bytes'"),
        ({"whole_words": True}, "whole_words must be left out with objective='causal'"),
        ({"model": "bert"}, "model must be one of stack, hf, but is 'bert'"),
        ({"model": "hf"}, "path must be the folder or name of a model with model='hf'"),
        ({"absolute": "fade"}, "fade must be a number of steps with absolute='fade'"),
        ({**BERT, "objective": "causal"}, "objective must be 'masked' with model='hf', but is 'causal'"),
        ({**BERT, "packed": True}, "packed must be false with model='hf'"),
        ({**BERT, "tokens": "bytes"}, "tokens must be 'wordpiece' or 'bpe' with model='hf'"),
        ({**BERT, "vocabulary": 300}, "vocabulary and tied be left out: they are the model's"),
        ({"test": 1.5}, "test must be a share between 0 and 1, but is 1.5"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        LanguageModel(**options)


@pytest.mark.parametrize("tokens", ["bpe", "wordpiece"])
def test_tokenizers_are_stored_and_taken_from_the_data(tmp_path, tokens):
    task = LanguageModel(tokens=tokens, vocabulary=300)
    assert (
        task.alphabet.symbols <= 300
        and task.decoded(task.codes("the baker sold a lamp.")).replace(" ", "") == "thebakersoldalamp."
    )
    stored = sorted((tmp_path / "cache" / "tokenizers").iterdir())
    assert [path.name.startswith(tokens) for path in stored] == [True]
    task.examples("test")
    assert len(list((tmp_path / "cache" / "lm").iterdir())) == 1
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("\n\n".join(["other words"] * 30))
    (data / "tokenizer.json").write_text(stored[0].read_text())
    assert LanguageModel(data, tokens=tokens).codes("the baker") == task.codes("the baker")
    (data / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a tokenizer of the tokenizers library"):
        _ = LanguageModel(data, tokens=tokens).alphabet


def test_presets_and_defaults_make_models():
    assert set(LanguageModel.presets) == {"shakespeare", "bert-small"}
    config = make_config("lm", preset="bert-small")
    assert (config.layers, config.dim, config.task_options["objective"]) == (4, 256, "masked")
    assert make_config("lm", preset="shakespeare").encoding == "rotary"
    assert make_config("lm", "learned").encoding_options == {"length": 128}


def test_a_run_keeps_its_tokenizer_generates_and_is_a_start(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("\n\n".join(f"The number {number} and its neighbour {number + 1}." for number in range(200)))
    changes = {**SMALL, "steps": 10, "task.length": 32, "task.tokens": "bpe", "task.vocabulary": 300}
    encoding = changes.pop("encoding")
    lengths = {"lengths": (64,)}
    result = train(make_config("lm", encoding, **changes, **lengths), tmp_path / "run", Settings(data=data, device="cpu"))
    assert (tmp_path / "run" / "tokenizer.json").is_file()
    words = ["generate", str(tmp_path / "run"), "--prompt", "The ", "--length", "20", "--count", "2", "--device", "cpu"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    texts = [(tmp_path / "run" / "generated" / f"text-{number}.txt").read_text() for number in range(2)]
    assert all(text.startswith("The ") for text in texts)
    done = CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "run"), "--data", str(data), "--lengths", "64,128", "--device", "cpu"]
    )
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [line["length"] for line in lines] == [None, 64, 128]
    assert result["curves"] == {
        name: {"loss_by_position": line["loss_by_position"]} for name, line in zip(("own", "64"), lines, strict=False)
    }
    for line in lines:
        count = sum(tokens for _, _, tokens in line["loss_by_position"])
        assert sum(nats * tokens for _, nats, tokens in line["loss_by_position"]) / count == pytest.approx(line["loss"], rel=1e-4)
    given = load_latest(Run(tmp_path / "run").checkpoints).tensors["model"]
    start = make_config("lm", encoding, **{**changes, "seed": 3, "start": str(tmp_path / "run")})
    model = Session(start, Settings(data=data, device="cpu")).model.state_dict()
    assert all(torch.equal(x, given[name]) for name, x in model.items())


@pytest.mark.parametrize("encoding", ["t5", "huang4", "xl", "rotary", "sinusoidal", "learned"])
def test_questions_and_sentences_start_from_a_masked_model(tmp_path, encoding):
    sizes = {"dim": 16, "layers": 2, "heads": 2, "batch": 4, "evaluate_examples": 4, "steps": 1}
    own = {"encoding.length": 64} if encoding == "learned" else {}
    masked = {"task.objective": "masked", "task.tokens": "wordpiece", "task.vocabulary": 200, "task.length": 32}
    settings = Settings(device="cpu")
    train(make_config("lm", encoding, **sizes, **own, **masked), tmp_path / "lm" / encoding / "x-seed0", settings)
    given = load_latest(tmp_path / "lm" / encoding / "x-seed0" / "checkpoints").tensors["model"]
    pattern = {"start": str(tmp_path / "lm" / "{encoding}" / "*-seed0")}
    tokenizer = {"task.tokenizer": str(tmp_path / "lm" / encoding / "x-seed0" / "tokenizer.json")}
    short = {"task.stride": 16, "task.question": 16, "task.length": 64}
    for name, options in (("squad", {**short}), ("glue/cola", {**own})):
        config = make_config(name, encoding, **sizes, **pattern, **tokenizer, **options, seed=1)
        model = Session(config, settings).model.state_dict()
        assert all(torch.equal(model[key], x) for key, x in given.items() if key.startswith(("embedding.", "encoder.")))
        assert {key for key in model if key.startswith(("embedding.", "encoder."))} == set(given)
        result = train(config, tmp_path / name, settings)
        assert math.isfinite(result["test"]["loss"])
    if encoding == "learned":
        shorter = make_config("squad", encoding, **sizes, **pattern, **tokenizer, **{**short, "task.length": 60})
        with pytest.raises(ValueError, match=r"is \[64, 16\] there and \[60, 16\] here: use the same encoding with the same opt"):
            Session(shorter, settings)


@pytest.fixture
def bert(tmp_path):
    """Returns the options of the task with a random BERT, whose tokenizer is not that of the data."""
    made = LanguageModel(tokens="wordpiece", vocabulary=150)
    return {**BERT, "path": str(random_bert(tmp_path / "bert", made.tokenizer)), "length": 32}


def test_a_hugging_face_model_goes_on_with_its_pre_training(bert):
    task = LanguageModel(**bert)
    assert task.alphabet.symbols == 150
    losses = losses_of(task, config_of(encoding="shaw", encoding_options={"max_lag": 8}), 40)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    for encoding in ("learned", "t5"):
        model, batch = model_of(task, encoding=encoding), some(task)
        # All scores, of which those of hidden tokens are taken.
        expected = model.inner(input_ids=batch["tokens"]).logits.flatten(0, 1)[batch["chosen"]]
        assert torch.equal(model(batch), expected) and expected.shape == (len(batch["targets"]), 150)
    longer = some(task, length=128)
    assert model(longer).isfinite().all()


@pytest.mark.parametrize(("encoding", "absolute"), [("huang4", {}), ("t5", {"absolute": "fade", "fade": 2}), ("learned", {})])
def test_questions_and_sentences_start_from_a_converted_model_that_went_on(tmp_path, bert, encoding, absolute):
    sizes = {"batch": 4, "evaluate_examples": 4, "steps": 3}
    masked = {f"task.{name}": value for name, value in {**bert, **absolute}.items()}
    first = tmp_path / "lm" / encoding / "x-seed0"
    train(make_config("lm", encoding, **sizes, **masked), first, CPU)
    given = load_latest(first / "checkpoints").tensors["model"]
    start = {"start": str(tmp_path / "lm" / "{encoding}" / "*-seed0"), "task.model": "hf", "task.path": bert["path"]}
    for name, short in (("squad", {"task.stride": 16, "task.question": 16}), ("glue/cola", {})):
        config = make_config(name, encoding, **sizes, **start, **short, **{"task.length": 48}, seed=1)
        session = Session(config, CPU)
        model, body = session.model.state_dict(), set(session.model.shared_names())
        assert all(torch.equal(model[key], given[key]) for key in body)
        # What is left is the head's; its pooler is the one that the model was stored with.
        assert {key.removeprefix("inner.").split(".")[0] for key in model.keys() - body} <= {
            "bert",
            "qa_outputs",
            "classifier",
            "steps",
        }
        assert all("pooler" in key for key in model.keys() - body if key.startswith("inner.bert."))
        assert math.isfinite(train(config, tmp_path / name, CPU)["test"]["loss"])
    with pytest.raises(ValueError, match="start must be a run whose embedding and encoder have the sizes of this one"):
        Session(make_config("squad", encoding, **sizes, start=str(first)), CPU)
    kept = make_config("glue/cola", encoding, **sizes, **start, **{"task.length": 48, "task.absolute": "keep"})
    if encoding == "learned":
        Session(kept, CPU)
    else:
        with pytest.raises(ValueError, match="absolute must be 'remove' to start from a run with absolute='"):
            Session(kept, CPU)


def test_pieces_of_words_are_the_same_each_time(tmp_path, monkeypatch):
    first = LanguageModel(tokens="wordpiece", vocabulary=150).tokenizer.to_str()
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path / "other"))
    assert LanguageModel(tokens="wordpiece", vocabulary=150).tokenizer.to_str() == first


def test_generated_bytes_that_are_no_text_are_marked():
    task = LanguageModel()
    assert task.decoded([BYTE_END, *"é".encode(), 0xC3, ord("a"), BYTE_MASK]) == "é\N{REPLACEMENT CHARACTER}a"


def test_masked_models_do_not_generate(tmp_path):
    task = LanguageModel(objective="masked")
    with pytest.raises(ValueError, match="objective must be 'causal' to generate"):
        task.generate(model_of(task), None, Sampling(), tmp_path)


def test_a_model_in_training_is_not_drawn_from():
    model = model_of(LanguageModel()).train()
    assert isinstance(model, CausalModel)
    with pytest.raises(ValueError, match="model must be in evaluation mode"):
        generate_tokens(model, torch.zeros(1, 1, dtype=torch.int64), Sampling())
