"""What the lens lets models read: texts and examples of runs, with names of their tokens, and models of Hugging Face."""

import shutil
from typing import Any

import pytest
import torch
import transformers
from test_lens_capture import tiny_bert
from test_lens_page import WORDS, facts, save_tokenizer
from tokenizers import Tokenizer, models
from typer.testing import CliRunner

import lagwise
import lagwise.hf
from lagwise import lens
from lagwise.hf.conversion import last_position
from lagwise.lab.cli import app
from lagwise.lab.cli.lens import is_path
from lagwise.lab.config import Config
from lagwise.lab.experiment import make_config, make_task
from lagwise.lab.look_pretrained import look_at_pretrained
from lagwise.lab.look_run import token_words
from lagwise.lab.loop import Settings
from lagwise.lab.run import train
from lagwise.lab.tasks.base import Task
from lagwise.lab.tasks.lra.byte_text import SAMPLE_SIZES
from lagwise.lab.tasks.text.glue import Glue
from lagwise.lab.tasks.text.lm import LanguageModel
from lagwise.lab.tasks.text.sentences import Sentences
from lagwise.lab.tasks.text.squad import Squad
from lagwise.lab.tasks.text.translation import Translate

SMALL: dict[str, Any] = {"steps": 1, "dim": 16, "layers": 1, "heads": 2, "hidden": 16, "batch": 2, "evaluate_examples": 2}
TEXT = "the cat sat on a mat and slept ."


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LAGWISE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def task_of(name: str, **options) -> tuple[Task, Config]:
    config = make_config(name, encoding="t5", dim=16, layers=1, heads=2, task_options=options)
    return make_task(config, None), config


def named(name: str, number: int = 0, **options) -> tuple[Task, list[str]]:
    """Returns a task, and the names of the tokens of one of its test examples."""
    task, config = task_of(name, **options)
    return task, token_words(task, task.model(config), task.examples("test").batch([number]))


# Names of tokens


def test_bytes_are_characters():
    task, found = named("text", 3)
    assert found[0] == "[first]" and found[-1] == "."
    assert "".join(found[1:]).startswith(("The ", "This ", "A ", "That ")) and SAMPLE_SIZES["test"] > 3
    assert task.token_names("né\n".encode()) == ["n", r"\xc3", r"\xa9", r"\x0a"]
    _, found = named("retrieval")
    assert found[0] == "[first]" and all(len(each) == 1 for each in found[1:5])


def test_symbols_of_grammars_are_named():
    sizes = {"train": 4, "validation": 4, "test": 4}
    _, found = named("reber", **sizes)
    assert set(found) <= set("BTPSXVE") and found[0] in "TP" and found[1] == "B"
    _, found = named("listops", **sizes, shortest=5, longest=30)
    assert sum(each.startswith("[") for each in found[1:]) == found.count("]") > 0
    assert set(found[1:]) <= {*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"}
    _, found = named("process-50", **sizes)
    assert set(found) == {"0", "1"}


def test_pieces_and_words_are_named():
    task, found = named("glue/sst2")
    assert isinstance(task, Glue)
    assert found[0] == "[CLS]" and found[-1] == "[SEP]"
    assert " ".join(found[1:-1]).replace(" ##", "") == task.items("test")[0].texts[0].lower().replace(",", " ,").replace(
        ".", " ."
    )
    task, found = named("squad")
    assert isinstance(task, Squad)
    asked = task.articles["dev"][0].questions[0]
    assert " ".join(found[1 : found.index("[SEP]")]).replace(" ##", "") == asked.text.lower().replace("?", " ?")
    assert task.token_names([10**6]) == ["1000000"]
    task, found = named("mr")
    assert isinstance(task, Sentences)
    assert found == task.sentences["test"][0].text.split()
    assert task.token_names([0, 1]) == ["[padding]", "[unknown]"]


def test_notes_are_named():
    _, found = named("piano", length=16)
    assert found[0] == "Bar_None" and len(found) == 16
    assert any(each.startswith("Pitch_") for each in found)


def test_both_sides_of_a_translation_are_named_only_where_their_lengths_tell_them_apart():
    task, config = task_of("translation")
    assert isinstance(task, Translate)
    model, batch = task.model(config), task.examples("test").batch([0])
    source, split = batch["tokens"], task.texts("test").source
    assert "".join(task.token_names(source[0].tolist())[: int(batch["lengths"][0]) - 1]).strip() in split
    assert token_words(task, model, {**batch, "inputs": source}) == [str(place) for place in range(source.shape[1])]
    assert token_words(task, model, {**batch, "inputs": source[:, 1:]}) == task.token_names(source[0].tolist())


def test_values_are_called_by_their_places():
    _, found = named("adding", train=4, validation=4, test=4, length=30)
    assert found == [str(place) for place in range(30)]


# Texts that runs read


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", ["[first]", *"A dull film."]),
        ("glue/sst2", ["[CLS]", "a", "dull", "film", ".", "[SEP]"]),
        ("mr", ["a", "dull", "film", "[unknown]"]),
        ("lm", ["[special]", *"A dull film."]),
    ],
)
def test_a_run_on_plain_text_reads_a_given_one(name, words, tmp_path):
    train(make_config(name, encoding="t5", **SMALL), tmp_path / "run", Settings(device="cpu"))
    out = tmp_path / "page.html"
    command = ["lens", str(tmp_path / "run"), "--device", "cpu", "--out", str(out)]
    ended = CliRunner().invoke(app, [*command, "--text", "A dull film ." if name == "mr" else "A dull film."])
    assert ended.exit_code == 0, ended.output
    found = facts(out.read_text())
    assert found["tokens"] == words and found["layers"][0]["tokens"] == len(words)
    for more, said in (
        (["--text", " "], "--text must have words to read"),
        (["--text", "a", "--example", "1"], "--example must be left out beside --text"),
    ):
        ended = CliRunner().invoke(app, [*command, *more])
        assert ended.exit_code == 2 and said in ended.output


def test_tasks_say_what_they_cannot_read():
    for name in ("process-50", "glue/mrpc", "squad"):
        with pytest.raises(ValueError, match="--text must be left out for a run of this task"):
            task_of(name)[0].text_batch("a text")
    with pytest.raises(ValueError, match="text must have at most 8 tokens, the run's length, but has more"):
        task_of("glue/sst2", length=8)[0].text_batch("a film " * 8)


def test_a_learned_table_says_where_it_ends():
    config = make_config("text", encoding="learned", dim=16, layers=1, heads=2, task_options={"length": 8})
    task = make_task(config, None)
    with pytest.raises(ValueError, match="length"):
        task.model(config)(task.text_batch("much longer than that"))


def test_masked_models_read_a_text_as_it_is():
    task, config = task_of("lm", objective="masked", length=16)
    assert isinstance(task, LanguageModel)
    batch = task.text_batch("a cat")
    assert task.model(config)(batch).shape[0] == batch["tokens"].shape[1] == 6
    assert task.token_names([task.alphabet.end, task.alphabet.mask, ord("a")]) == ["[special]", "[mask]", "a"]


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    sizes = {"train": 8, "validation": 4, "test": 4}
    train(make_config("process-50", encoding="t5", **SMALL, task_options=sizes), tmp_path, Settings(device="cpu"))
    shutil.rmtree(tmp_path / "checkpoints")
    ended = CliRunner().invoke(app, ["lens", str(tmp_path), "--device", "cpu"])
    assert ended.exit_code == 2 and "has no checkpoint" in ended.output


# Models of Hugging Face


def tiny_gpt2() -> transformers.GPT2Model:
    config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    return transformers.GPT2Model(config).eval()


def tiny_mpnet() -> transformers.MPNetModel:
    config = transformers.MPNetConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=18,
    )  # fmt: skip
    return transformers.MPNetModel(config, add_pooling_layer=False).eval()


def relative_bert() -> transformers.PreTrainedModel:
    names = [f"encoder.layer.{number}.attention.self.distance_embedding.weight" for number in range(2)]
    model = tiny_bert(position_embedding_type="relative_key_query")
    return lagwise.hf.restore_relative(model, {name: torch.randn(31, 8) for name in names})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "scores"), [("huang4", ["content", "key", "query"]), ("t5", ["bias", "content"]), ("rotary", ["content"])]
)
def test_the_command_looks_at_a_converted_model(name, scores, causal, tmp_path):
    plain = tiny_gpt2() if causal else tiny_bert()
    options = {"neutral": False} if name == "t5" else {}
    model = lagwise.hf.convert(plain, name, **options).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    ids = torch.arange(1, len(WORDS) + 1)[None]
    with torch.no_grad(), lens.capture(model) as calls:
        model(ids)
    found = look_at_pretrained(str(tmp_path), TEXT, 512)
    assert found.tokens == WORDS and not found.notes and len(found.calls) == 2
    for call, wanted in zip(found.calls, calls, strict=True):
        assert sorted(call.parts().scores) == scores and call.causal == causal
        torch.testing.assert_close(call.parts().posterior, wanted.parts().posterior)
    out = tmp_path / "page.html"
    ended = CliRunner().invoke(app, ["lens", str(tmp_path), "--text", TEXT, "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    assert [layer["bias"] for layer in facts(out.read_text())["layers"]] == [name == "t5"] * 2
    # Without absolute positions a text may be longer than those were.
    assert last_position(model) > 10**6
    assert len(look_at_pretrained(str(tmp_path), f"{TEXT} " * 3, 512).tokens) == 27


def test_a_converted_model_with_linear_attention_says_so(tmp_path):
    plain = tiny_bert(attention_probs_dropout_prob=0.0)
    lagwise.hf.convert(plain, "t5", attention="linear", feature_map="relu").save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    found = look_at_pretrained(str(tmp_path), TEXT, 512)
    assert len(found.notes) == 1 and found.notes[0].startswith("Attention is linear")
    assert sorted(found.calls[0].parts().scores) == ["bias", "content"]


@pytest.mark.parametrize("make", [tiny_bert, tiny_gpt2, tiny_mpnet, relative_bert])
def test_a_text_that_is_longer_than_the_positions_is_cut_in_words(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    assert last_position(model) == 16
    found = look_at_pretrained(str(tmp_path), f"{TEXT} " * 2, 512)
    assert found.notes == ["The text has 18 tokens, of which the model reads the first 16."]
    assert len(found.tokens) == found.calls[0].q.shape[2] == 16
    assert look_at_pretrained(str(tmp_path), f"{TEXT} " * 2, 5).notes[0].endswith("the first 5.")


def test_what_a_pretrained_model_cannot_read_is_said_in_words(tmp_path):
    tiny_bert().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"or a model with its tokenizer, but .* has none: save it there too"):
        look_at_pretrained(str(tmp_path), TEXT, 512)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="--text must have words to read, but is empty"):
        look_at_pretrained(str(tmp_path), "", 512)
    with pytest.raises(ValueError, match="--tokens must be at least 1, but is 0"):
        look_at_pretrained(str(tmp_path), TEXT, 0)
    ended = CliRunner().invoke(app, ["lens", str(tmp_path), "--example", "2"])
    assert ended.exit_code == 2 and "--example must be left out" in ended.output
    blind = Tokenizer(models.BPE({"x": 0}, []))
    transformers.PreTrainedTokenizerFast(tokenizer_object=blind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="--text must have tokens of the model, but its tokenizer finds none in 'cat'"):
        look_at_pretrained(str(tmp_path), "cat", 512)


@pytest.mark.parametrize("name", ["runs/nothing", "./nothing", "../nothing", "/nothing", "~/nothing", "a/b/c", "nothing/"])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("lagwise.lab.look_pretrained.look_at_pretrained", lambda *_: pytest.fail("asked the Hub"))
    ended = CliRunner().invoke(app, ["lens", name])
    assert ended.exit_code == 2 and f"there is no folder {name}" in ended.output


@pytest.mark.parametrize("name", ["google-t5/t5-small", "bert-base-uncased", "runs-of-mine/model"])
def test_names_of_the_hub_are_no_folders(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not is_path(name)
