"""The page of the lens: what it holds is what the lens found, it stays small, and a browser shows it."""

import io
import json
import re
import subprocess
import sys
from base64 import b64decode
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image, ImageStat
from test_report import EVIL, approximately, assert_readable, chromium, numbers_in, read, resize, told, watched_tab
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

import lagwise
import lagwise.hf
from lagwise import LagTable, Terms, lens
from lagwise.call import Call
from lagwise.lab.cli import app
from lagwise.lab.config import Config
from lagwise.lab.experiment import make_config, make_task
from lagwise.lab.look import edges_of, kernels_of
from lagwise.lab.look_pretrained import load_pretrained, look_at_pretrained
from lagwise.lab.look_run import token_words, untrained_model
from lagwise.lab.loop import Session, Settings
from lagwise.lab.run import train
from lagwise.lab.tasks.models import Classifier
from lagwise.lens.model_page import HIDDEN, Lengths, curve_reach, map_size, page

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "slept", "."]


def look(encoding: str = "t5", causal: bool = False, words: int = len(WORDS)) -> list[lens.Captured]:
    """Returns what two layers of two heads did with a text of random vectors; their bias is random too."""
    stack = lagwise.nn.Decoder if causal else lagwise.nn.Encoder
    model = stack(16, layers=2, heads=2, encoding=encoding).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with lens.capture(model) as calls:
        model(torch.randn(1, words, 16))
    return calls


def made(calls: list[lens.Captured], tokens: list[str] = WORDS, **options) -> str:
    return page(calls, tokens, title="A model", command="lagwise lens", **options)


def facts(text: str) -> dict:
    return json.loads(read(text).scripts[0])


def floats(text: str, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(b64decode(text), dtype="<f4").copy()).reshape(*shape)


def unpacked(layer: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the context score of a layer, NaN where a key is hidden, and the sums, as the page's script finds them."""
    heads, size = layer["heads"], layer["shown"]
    codes = torch.from_numpy(np.frombuffer(b64decode(layer["context"]), dtype="<u2").astype("f8")).reshape(heads, size, size)
    low, step = (torch.tensor(layer[name], dtype=torch.float64)[:, None, None] for name in ("low", "step"))
    return torch.where(codes == HIDDEN, torch.nan, low + step * codes), floats(layer["sums"], 3, heads, size)


@pytest.mark.parametrize("causal", [False, True])
def test_the_page_holds_what_the_lens_found(causal):
    calls = look(causal=causal)
    for call, layer in zip(calls, facts(made(calls))["layers"], strict=True):
        parts, prior = call.parts(), call.prior()
        context, sums = unpacked(layer)
        assert (layer["name"], layer["heads"], layer["shown"], layer["causal"]) == (call.layer, 2, len(WORDS), causal)
        torch.testing.assert_close(floats(layer["curve"], 2, -1), prior.bias)
        assert layer["first"] == prior.lags[0]
        posterior = (parts.prior_score[0] + context - sums[2, :, :, None]).exp().nan_to_num().float()
        torch.testing.assert_close(posterior, parts.posterior[0], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(
            (context - sums[1, :, :, None]).exp().nan_to_num().float(), parts.likelihood[0], atol=1e-4, rtol=1e-3
        )
        torch.testing.assert_close(context.isnan(), ~parts.visible.expand(2, -1, -1))
        attention = lens.average_attention([parts])
        torch.testing.assert_close(floats(layer["attention"], 2, -1), attention.mean.float())


def test_the_table_of_heads_says_what_the_lens_says():
    calls = look()
    rows = [row for row in read(made(calls)).rows if row and re.match(r"layer \d", row[0])]
    assert [row[0] for row in rows] == [f"layer {layer} · head {head}" for layer in (0, 1) for head in (0, 1)]
    prior, parts = calls[1].prior(), calls[1].parts()
    reached = lens.effective_range(prior.probability, prior.lags)[:, 1].tolist()
    wanted = [
        f"{prior.peak[1]:.4f}", f"{prior.peak_lag[1]:+d}", f"{lens.entropy(prior.probability)[1]:.3f}",
        f"{parts.divergence()[0, 1].mean():.3f}", *(f"±{each}" for each in reached),
    ]  # fmt: skip
    assert rows[3][1:] == wanted


def test_heads_without_a_bias_show_the_mean_logit_and_say_so():
    calls = look("rotary")
    text = made(calls)
    layer = facts(text)["layers"][0]
    assert not layer["bias"]
    assert "2 of 2 layers have no bias" in text
    logit = lens.expected_logits([calls[0].parts()])["logit"]
    torch.testing.assert_close(floats(layer["curve"], 2, -1), logit.mean.float())


def test_twelve_layers_of_twelve_heads_and_512_tokens_stay_below_5_megabytes():
    q, bias = torch.randn(1, 12, 512, 4), torch.randn(12, 1023)
    terms = Terms(bias=LagTable(bias, -511))
    call = lens.Captured("encoder.layer.0.attention", False, q, q, q, terms, Call(scale=0.5))
    names = [f"encoder.layers.{number}" for number in range(12)]
    kernels = dict.fromkeys(names, lens.Kernels(torch.arange(-511, 512), torch.rand(12, 1023, 4)))
    edges = dict.fromkeys(names, lens.bucket_edges(lagwise.AT5(heads=12)))
    ranges = dict.fromkeys(names, lens.dependency_ranges(lagwise.AT5(heads=12)))
    text = made([call] * 12, [f"word{n}" for n in range(512)], ranges=ranges, edges=edges, edges_before=edges, kernels=kernels)
    assert len(text.encode()) < 5_000_000
    layer = facts(text)["layers"][0]
    assert (layer["shown"], layer["tokens"], len(floats(layer["curve"], 12, -1)[0])) == (map_size(144), 512, 1023)
    assert f"Maps show the first {map_size(144)} of 512 tokens" in text
    context, sums = unpacked(layer)
    wanted = call.parts().posterior[0, :, :5, :5]
    bias_score = call.parts().prior_score[0, :, :5, :5]
    torch.testing.assert_close(
        (bias_score + context[:, :5, :5] - sums[2, :, :5, None]).exp().float(), wanted, atol=1e-5, rtol=1e-2
    )


def test_more_heads_have_smaller_maps_and_shorter_curves():
    assert map_size(144) > map_size(576) > 30
    assert curve_reach(144) >= 511 > curve_reach(576) > 100


def test_calls_that_are_left_out_are_counted_and_a_batch_is_refused():
    calls = look()
    crossed = [lens.Captured(**{**vars(calls[0]), "cross": True}), *calls]
    assert "are left out: 1 of 3 calls" in made(crossed)
    with pytest.raises(ValueError, match="calls must have one of self-attention"):
        made(crossed[:1])
    doubled = {**vars(calls[0]), **{name: getattr(calls[0], name).expand(2, -1, -1, -1) for name in "qkv"}}
    with pytest.raises(ValueError, match=r"calls must be of one text, but .* has a batch of 2"):
        made([lens.Captured(**doubled)])


def test_nothing_breaks_out_of_its_place():
    calls = [lens.Captured(**{**vars(call), "layer": EVIL}) for call in look()]
    text = page(calls, [EVIL] * len(WORDS), title=EVIL, command=EVIL, notes=[EVIL], ranges={EVIL: torch.tensor([[3.0]])})
    found = read(text)
    assert found.tags.count("script") == 2 and "img" not in found.tags
    assert not found.addresses
    assert json.loads(found.scripts[0])["tokens"] == [EVIL] * len(WORDS)


def test_ranges_and_ablation_are_there_where_they_are_given():
    calls = look()
    order = [lens.PriorHead((calls[1].layer,), 1, 0.25, -3)]
    ablation = lens.Ablation(order, [0.5, 0.75])
    ranges = {
        "encoding": torch.tensor([[2.5, torch.inf], [4.0, 1.0]]),
        "layers.1.attention.encoding": torch.tensor([[3.0, 2.0]]),
    }
    text = made(calls, ranges=ranges, ablation=ablation, metric="accuracy")
    assert ["encoding, layers 0, 1 · head 0", "2.5", "4.0"] in read(text).rows
    assert ["encoding, layers 0, 1 · head 1", "no end", "1.0"] in read(text).rows
    assert ["layers.1.attention.encoding, layer 1 · head 1", "2.0", "-"] in read(text).rows
    assert facts(text)["ablation"] == {
        "metric": "accuracy", "values": [0.5, 0.75], "heads": ["layer 1 · head 1, peak 0.250 at lag -3"]
    }  # fmt: skip


def test_sections_without_anything_to_show_are_left_out():
    text = made(look())
    for mark in ("at5", "edges", "kernels", "lengths", "ablation"):
        assert f"<div data-{mark}>" not in text and not facts(text)[mark]


def test_kernels_of_many_heads_keep_the_page_small():
    many = {f"layer {n}": lens.Kernels(torch.arange(-511, 512), torch.rand(12, 1023, 4)) for n in range(12)}
    text = made(look(), kernels=many)
    kernel = facts(text)["kernels"][0]
    assert len(text.encode()) < len(made(look()).encode()) + 260_000
    band = floats(kernel["band"], 3, 12, -1)
    first = kernel["first"]
    assert -50 > first == -(band.shape[-1] // 2)
    near = many["layer 0"].values[:, 511 + first : 512 - first]
    torch.testing.assert_close(band, torch.stack([near.mean(-1), *near.quantile(torch.tensor([0.25, 0.75]), dim=-1)]))
    (causal,) = facts(made(look(causal=True), kernels={"one": many["layer 0"]}))["kernels"]
    assert floats(causal["band"], 3, 12, -1).shape[-1] == 1 - causal["first"]


def test_lengths_that_were_refused_have_their_reasons():
    found = lens.Extrapolation(torch.tensor([20]), torch.tensor([0.5]), 0.75, {4096: "the table <ends>"})
    text = made(look(), lengths=Lengths("test accuracy", found))
    assert "<li>4,096 was refused: the table &lt;ends&gt;</li>" in text and "which is marked too" not in text
    assert facts(text)["lengths"] == {"metric": "test accuracy", "points": [[20, 0.5]], "length": None, "trained": 0.75}


# The command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that took two steps."""
    folder = tmp_path_factory.mktemp("run")
    small = {"train": 64, "validation": 20, "test": 20}
    config: Config = make_config("process-50", encoding="at5", steps=2, lengths=(60, 80), task_options=small)
    train(config, folder, Settings(device="cpu"))
    return folder


def test_the_command_looks_at_a_run(run, tmp_path):
    out = tmp_path / "page.html"
    ended = CliRunner().invoke(app, ["lens", str(run), "--ablate", "--device", "cpu", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    found = facts(out.read_text())
    assert (len(found["layers"]), found["layers"][0]["heads"], len(found["tokens"])) == (1, 4, 50)
    assert set(found["tokens"]) == {"0", "1"}
    assert len(found["ablation"]["values"]) == 5 and found["ablation"]["metric"] == "validation accuracy"
    assert sum("head" in row[0] and len(row) == 3 for row in read(out.read_text()).rows) >= 4
    assert [(each["name"], len(each["now"]), len(each["now"][0])) for each in found["edges"]] == [("encoder.encoding", 2, 4)]
    assert found["edges"][0]["before"] != found["edges"][0]["now"]
    assert [length for length, _ in found["lengths"]["points"]] == [50, 60, 80]
    assert (found["lengths"]["metric"], found["lengths"]["length"]) == ("test accuracy", 50)


def test_ablations_of_runs_are_lines(run, tmp_path):
    save = tmp_path / "new" / "ablation.jsonl"
    for count in (1, 2):
        ended = CliRunner().invoke(app, ["ablate", str(run), "--device", "cpu", "--save", str(save)])
        assert ended.exit_code == 0 and "added to" in ended.output, ended.output
        lines = [json.loads(line) for line in save.read_text().splitlines()]
        assert len(lines) == count
    found, stored = lines[-1], json.loads((run / "result.json").read_text())
    assert (found["metric"], found["split"], found["config"]["encoding"]) == ("accuracy", "validation", "at5")
    assert len(found["values"]) == 5 and found["values"][-1] == pytest.approx(stored["validation"]["accuracy"])
    peaks = [head["peak"] for head in found["heads"]]
    assert len(peaks) == 4 and peaks == sorted(peaks)


def test_a_run_begins_from_the_model_that_is_called_untrained(run):
    session = Session(Config.from_json(json.loads((run / "config.json").read_text())), Settings(device="cpu"))
    before = untrained_model(session)
    assert before is not None
    for (name, wanted), found in zip(session.model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(wanted, found), name
    assert torch.equal(edges_of(before)["encoder.encoding"], lens.bucket_edges(session.model.encoder.encoding))


def test_mpnet_has_the_buckets_of_a_t5():
    config = transformers.MPNetConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    found = edges_of(transformers.MPNetModel(config))
    assert list(found) == ["encoder"] and torch.equal(found["encoder"], lens.bucket_edges(lagwise.T5(heads=2)))


def test_kernels_that_cannot_be_had_are_told():
    model = torch.nn.ModuleDict({
        "line": lagwise.ConvSPE(heads=2, head_dim=4, kernel_size=3),
        "grid": lagwise.ConvSPE(heads=2, head_dim=4, kernel_size=3, grid=(5,)),
    })  # fmt: skip
    found, without = kernels_of(model, 10)
    assert list(found) == ["line"] and found["line"].values.shape == (2, 19, 4)
    assert len(without) == 1 and without[0].startswith("grid shows no kernels: ")


@pytest.mark.parametrize(
    ("more", "words"), [(["--text", "a"], "--text must be left out"), (["--example", "20"], "--example must be from 0 to 19")]
)
def test_the_command_says_what_a_run_cannot_do(run, more, words):
    ended = CliRunner().invoke(app, ["lens", str(run), "--device", "cpu", *more])
    assert ended.exit_code == 2 and words in ended.output


def test_a_language_model_reads_a_given_text(tmp_path):
    config = make_config(
        "lm", encoding="alibi", steps=1, dim=16, layers=1, heads=2, hidden=16, batch=2, task_options={"length": 32}
    )
    train(config, tmp_path / "run", Settings(device="cpu"))
    out = tmp_path / "page.html"
    ended = CliRunner().invoke(app, ["lens", str(tmp_path / "run"), "--text", "a cat", "--device", "cpu", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    found = facts(out.read_text())
    assert found["tokens"] == ["[special]", *"a cat"]
    assert found["layers"][0]["causal"] and found["layers"][0]["tokens"] == 6
    ended = CliRunner().invoke(app, ["lens", str(tmp_path / "run"), "--device", "cpu", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    assert len(facts(out.read_text())["tokens"]) == facts(out.read_text())["layers"][0]["tokens"] == 32


def test_the_first_text_of_a_group_is_looked_at():
    call = look(words=4)[0]
    group = {**vars(call), **{name: torch.cat([getattr(call, name), torch.randn(2, 2, 4, 8)]) for name in "qkv"}}
    group["call"] = replace(call.call, key_mask=torch.ones(3, 4, dtype=torch.bool))
    torch.testing.assert_close(lens.Captured(**group).first_row().parts().posterior, call.parts().posterior)


def test_tokens_are_named_as_the_model_reads_them():
    config = make_config("process-50", encoding="t5", dim=16, layers=1, heads=2)
    task = make_task(config, None)
    batch = {"tokens": torch.tensor([[1, 0, 1], [0, 0, 0]])}
    assert token_words(task, task.model(config), batch) == ["1", "0", "1"]
    assert token_words(task, Classifier(config, symbols=2, classes=2, pooling="first"), batch) == ["[first]", "1", "0", "1"]
    assert token_words(task, task.model(config), {**batch, "inputs": batch["tokens"]}) == ["0", "1", "2"]


def save_tokenizer(folder) -> None:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def save_t5(folder) -> None:
    config = transformers.T5Config(
        vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, dropout_rate=0.0
    )
    transformers.T5Model(config).save_pretrained(folder)
    save_tokenizer(folder)


WITHOUT_THE_HARNESS = """
import sys
# peft, where it is installed, asks for accelerate when transformers finds it.
for name in ("accelerate", "datasets", "peft", "sacrebleu", "torchmetrics"):
    sys.modules[name] = None
from lagwise.lab.cli import app
app(["lens", sys.argv[1], "--text", "the cat sat", "--out", sys.argv[2]])
"""


def test_a_hugging_face_model_needs_nothing_of_the_harness(tmp_path):
    save_t5(tmp_path)
    out = tmp_path / "page.html"
    words = [sys.executable, "-c", WITHOUT_THE_HARNESS, str(tmp_path), str(out)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert facts(out.read_text())["tokens"] == WORDS[:3]


def test_the_command_looks_at_a_t5(tmp_path):
    save_t5(tmp_path)
    out = tmp_path / "page.html"
    ended = CliRunner().invoke(app, ["lens", str(tmp_path), "--text", "the cat sat on a mat", "--tokens", "5", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    text = out.read_text()
    found = facts(text)
    assert found["tokens"] == WORDS[:5]
    assert [layer["name"] for layer in found["layers"]] == [
        "encoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention"
    ]  # fmt: skip
    assert [layer["causal"] for layer in found["layers"]] == [False, True]
    assert [each["name"] for each in found["edges"]] == [layer["name"] for layer in found["layers"]]
    assert found["edges"][0]["now"] == lens.bucket_edges(lagwise.T5(heads=2)).tolist()
    assert found["edges"][1]["now"] == lens.bucket_edges(lagwise.T5(heads=2, causal=True)).tolist()
    for words in (
        "has 6 tokens, of which the model reads the first 5",
        "are left out: 1 of 3 calls",
        "The decoder reads the same",
    ):
        assert words in text
    ended = CliRunner().invoke(app, ["lens", str(tmp_path), "--ablate"])
    assert ended.exit_code == 2 and "--ablate must be left out" in ended.output
    ended = CliRunner().invoke(app, ["lens", str(tmp_path), "--device", "cuda"])
    assert ended.exit_code == 2 and "--data and --device must be left out" in ended.output


def test_the_command_looks_at_a_relative_bert(tmp_path):
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, position_embedding_type="relative_key",
    )  # fmt: skip
    table = {"encoder.layer.0.attention.self.distance_embedding.weight": torch.randn(31, 8)}
    lagwise.hf.restore_relative(transformers.BertModel(config), table).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    found = look_at_pretrained(str(tmp_path), "the cat sat", 512)
    assert found.tokens == WORDS[:3]
    assert sorted(found.calls[0].parts().scores) == ["content", "query"]
    assert not load_pretrained(str(tmp_path)).training


def test_a_folder_without_a_model_is_refused_in_words(tmp_path):
    ended = CliRunner().invoke(app, ["lens", str(tmp_path)])
    assert ended.exit_code == 2 and "MODEL_OR_RUN must be a run, or a model with its tokenizer" in ended.output


# In a browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def opened(browser, tmp_path):
    with watched_tab(browser, tmp_path) as show:
        yield show


def last_number(text: str) -> float:
    return float(text.split()[-1])


def test_a_browser_shows_the_chosen_head(opened):
    calls = look()
    tab = opened(made(calls))
    tab.click('[data-panel="1,1"]')
    assert (tab.input_value("[data-layer]"), tab.input_value("[data-head]")) == ("1", "1")
    prior, parts = calls[1].prior(), calls[1].parts()
    title, values = told(tab, "curve-value")
    peak = prior.peak_lag[1]
    assert title == f"lag {'+' if peak > 0 else ''}{peak}:"
    assert float(values["prior probability"]) == approximately(prior.peak[1])
    box = tab.locator("[data-curve] svg").bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.99, box["y"] + box["height"] / 2)
    assert told(tab, "curve-value")[0] == "lag +8:"
    tab.focus("[data-curve] svg")
    tab.keyboard.press("ArrowLeft")
    title, values = told(tab, "curve-value")
    assert title == "lag +7:" and float(values["bias, in nats"]) == approximately(prior.bias[1, -2])
    tab.click('[data-token="2"]')
    for kind in ("prior", "likelihood", "posterior"):
        values = tab.locator(f"[data-over] td[data-kind={kind}]").all_inner_texts()
        assert [float(value) for value in values] == [approximately(x) for x in getattr(parts, kind)[0, 1, 2]]
    assert tab.get_attribute("[data-over] tbody tr:nth-child(3)", "aria-current") == "true"


def test_a_browser_shows_maps_and_lines(opened):
    calls = look(causal=True)
    tab = opened(made(calls))
    tab.select_option("[data-head]", "1")
    parts = calls[0].parts()
    arrays = {
        "posterior": parts.posterior,
        "prior": parts.prior,
        "likelihood": parts.likelihood,
        "priorScore": parts.prior_score,
        "contextScore": parts.context_score,
        "finalScore": parts.final_score,
    }
    for kind, values in arrays.items():
        output = {"posterior": "[data-map-value]", "prior": "[data-part-value]", "likelihood": "[data-part-value]"}.get(
            kind, "[data-score-value]"
        )
        canvas = tab.locator(f"[data-map={kind}] canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        cell = box["width"] / len(WORDS)
        tab.mouse.move(box["x"] + 3.5 * cell, box["y"] + 6.5 * cell)
        said = tab.inner_text(output)
        assert said.startswith("query 6 “and”, key 3 “on”, lag -3: ")
        assert last_number(said) == approximately(values[0, 1, 6, 3])
        canvas.focus()
        tab.keyboard.press("ArrowDown")
        assert last_number(tab.inner_text(output)) == approximately(values[0, 1, 7, 3])
        tab.mouse.move(box["x"] + 6.5 * cell, box["y"] + 3.5 * cell)
        assert tab.inner_text(output).endswith("not seen")
    tab.locator("[data-map=posterior] canvas").click(position={"x": 5, "y": 5})
    assert tab.input_value("[data-query]") == "0"
    assert tab.locator("[data-lines] line").count() == int((parts.posterior[0, 1] >= 0.03).sum())


def brightness(picture: bytes) -> tuple[float, float]:
    """Returns the mean brightness of a picture, and how much it varies."""
    found = ImageStat.Stat(Image.open(io.BytesIO(picture)).convert("L"))
    return found.mean[0], found.stddev[0]


MAPS = ["posterior", "prior", "likelihood", "priorScore", "contextScore", "finalScore"]


def test_a_picture_of_a_whole_page_has_all_maps(opened):
    tab = opened(made(look()))
    tab.set_viewport_size({"width": 900, "height": 200})
    tab.reload()
    places = {kind: tab.locator(f"[data-map={kind}] canvas").bounding_box() for kind in MAPS}
    whole = Image.open(io.BytesIO(tab.screenshot(full_page=True))).convert("L")
    for kind, box in places.items():
        part = whole.crop((box["x"], box["y"], box["x"] + box["width"], box["y"] + box["height"]))
        assert ImageStat.Stat(part).stddev[0] > 20, kind


def test_a_printed_page_has_all_maps_and_lets_nothing_scroll(opened):
    ranges = {"encoding": torch.tensor([[2.5, torch.inf], [4.0, 1.0]])}
    tab = opened(made(look(), ranges=ranges))
    tab.set_viewport_size({"width": 900, "height": 200})
    tab.reload()
    assert tab.pdf(format="A4").count(b"/Subtype /Image") >= len(MAPS)
    tab.set_viewport_size({"width": 703, "height": 900})
    tab.emulate_media(media="print", color_scheme="dark")
    cut_off = """() => [...document.querySelectorAll(".wide, .scroll, .lines")].some(
        box => box.scrollHeight > box.clientHeight + 1 || box.scrollWidth > box.clientWidth + 1)"""
    tab.wait_for_function(f"() => !({cut_off})()", timeout=5000)
    # Paper is white, whatever the screen was.
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.querySelector('canvas')).filter") == "none"


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_charts_are_drawn_for_the_width_of_the_screen(opened, width):
    calls = [lens.Captured(**{**vars(call), "layer": f"encoder.block.{call.layer}.SelfAttention" * 2}) for call in look()]
    encoding, kernels = lagwise.AT5(heads=2), lens.spe_kernels(lagwise.SineSPE(heads=2, head_dim=8), 9)
    tab = opened(made(
        calls, notes=["word" * 40], ranges={"encoding": lens.dependency_ranges(encoding)},
        edges={"encoding": lens.bucket_edges(encoding)}, kernels={"encoding": kernels},
        lengths=Lengths("test accuracy", lens.Extrapolation(torch.tensor([20, 40]), torch.tensor([0.5, 0.25]), 0.75, {}), 10),
        ablation=lens.Ablation([lens.PriorHead(("a",), 0, 0.25, -3)], [0.5, 0.75]), metric="accuracy",
    ))  # fmt: skip
    resize(tab, width, "curve")
    assert_readable(tab, ["curve", "lines", "ranges", "at5", "edges", "kernels", "lengths", "ablation"])


def test_a_browser_sorts_the_table_and_shows_an_ablation(opened):
    calls = look()
    ablation = lens.Ablation([lens.PriorHead(("a",), 0, 0.25, -3)], [0.5, 0.75])
    tab = opened(made(calls, ablation=ablation, metric="accuracy", ranges={"encoding": torch.tensor([[2.5], [4.0]])}))
    peaks = torch.stack([call.prior().peak for call in calls]).flatten()
    names = [f"layer {layer} · head {head}" for layer in (0, 1) for head in (0, 1)]
    tab.locator("[data-heads] thead button").nth(1).focus()
    for descending in (False, True):
        tab.keyboard.press("Enter")
        order = peaks.argsort(descending=descending).tolist()
        assert tab.locator("[data-heads] tbody th").all_inner_texts() == [names[place] for place in order]
    tab.click('[data-choose="1,0"]')
    assert (tab.input_value("[data-layer]"), tab.input_value("[data-head]")) == ("1", "0")
    assert tab.locator('[data-panel="1,0"]').get_attribute("aria-pressed") == "true"
    tab.focus('[data-panel="1,0"]')
    tab.keyboard.press("ArrowUp")
    assert tab.input_value("[data-layer]") == "0"
    tab.focus("[data-ablation] svg")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("[data-ablation-value]").startswith("1 of 1 heads: accuracy 0.75; last switched on: head 0, peak")
    assert "2.5" in tab.inner_text("[data-at5-table]")


@pytest.mark.parametrize("encoding", ["t5", "rotary"])
def test_a_browser_shows_all_heads_at_a_glance(opened, encoding):
    calls = look(encoding)
    tab = opened(made(calls))
    assert tab.locator("[data-panel]").count() == 4
    for layer, call in enumerate(calls):
        mean = lens.average_attention([call.parts()])
        lags, values = (mean.lags, mean.mean) if encoding == "rotary" else (call.prior().lags, call.prior().probability)
        for head in range(2):
            panel = tab.locator(f'[data-panel="{layer},{head}"]')
            best = int(values[head].argmax())
            said = panel.get_attribute("aria-label")
            assert said.startswith(f"layer {layer} · head {head}: highest ") and said.endswith(
                f"at lag {lags[best]:+d}".replace("+0", "0")
            )
            assert numbers_in(said)[2] == approximately(values[head, best])
            heights = [float(point.split()[1]) for point in panel.locator("path").last.get_attribute("d")[1:].split("L")]
            wanted = 34 - values[head] / values[head].max() * 31
            assert heights == pytest.approx(wanted.tolist(), abs=0.06)


def point_at_row(tab, mark: str, row: int) -> None:
    """Points at a row of a chart."""
    parent = tab.locator(f"[data-{mark}]")
    parent.scroll_into_view_if_needed()
    tab.wait_for_selector(f"[data-{mark}] svg")
    box = parent.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 12 + 22 * (row + 0.5))


def test_a_browser_shows_ranges_and_chooses_heads_there(opened):
    calls = look()
    tab = opened(made(calls))
    tab.select_option("[data-layer]", "1")
    prior = calls[1].prior()
    reached = lens.effective_range(prior.probability, prior.lags)
    for head in range(2):
        point_at_row(tab, "ranges", head)
        wanted = {f"{share} % within": f"±{each}" for share, each in zip((50, 90, 99), reached[:, head].tolist(), strict=True)}
        assert told(tab, "ranges-value") == (f"layer 1 · head {head}:", wanted)
        widths = [float(bar.get_attribute("width")) for bar in tab.locator(f'[data-range="{head}"] rect').all()]
        lengths = reached[:, head].flip(0).log1p()
        torch.testing.assert_close(torch.tensor(widths) / widths[0], lengths / lengths[0], atol=5e-3, rtol=0.0)
    tab.focus("[data-ranges] svg")
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("Enter")
    assert tab.input_value("[data-head]") == "1"
    assert tab.get_attribute('[data-range="1"]', "class") == "own"
    tab.keyboard.press("ArrowUp")
    assert told(tab, "ranges-value")[0] == "layer 1 · head 0:"


def test_a_browser_shows_ranges_of_at5(opened):
    ranges = {"encoder": torch.tensor([[2.5, torch.inf], [4.0, 1.0]]), "decoder": torch.tensor([[3.0, 12.0]])}
    tab = opened(made(look(), ranges=ranges))
    assert told(tab, "at5-value") == ("layers 0, 1 · head 0:", {"past": "2.5", "future": "4"})
    assert tab.locator("[data-at5] rect").count() == 4 and tab.locator("[data-at5] .inside").all_text_contents() == ["no end"]
    tab.focus("[data-at5] svg")
    tab.keyboard.press("ArrowDown")
    assert told(tab, "at5-value") == ("layers 0, 1 · head 1:", {"past": "no end", "future": "1"})
    tab.select_option("[data-at5-of]", label="decoder")
    point_at_row(tab, "at5", 1)
    assert told(tab, "at5-value") == ("layers 0, 1 · head 1:", {"past": "12"})
    widths = [float(bar.get_attribute("width")) for bar in tab.locator("[data-at5] rect").all()]
    assert widths[1] / widths[0] == pytest.approx(np.log1p(12) / np.log1p(3), rel=1e-2)


def test_a_browser_shows_edges_before_and_after_training(opened):
    now, before = lagwise.AT5(heads=2, slopes=(4.0, 8.0)), lagwise.AT5(heads=2, slopes=(20.0, 40.0))
    fixed = lens.bucket_edges(lagwise.T5(heads=2, causal=True))
    edges = {"at5": lens.bucket_edges(now), "t5": fixed}
    tab = opened(made(look(), edges=edges, edges_before={"at5": lens.bucket_edges(before)}))
    tab.focus("[data-edges] svg")
    tab.keyboard.press("ArrowDown")
    both = [lens.bucket_edges(each)[side, 1] for side in (0, 1) for each in (now, before)]
    names = ["past", "past, before the training", "future", "future, before the training"]
    title, values = told(tab, "edges-value")
    assert title == "layers 0, 1 · head 1:" and list(values) == names
    # What is read at a row is short; the numbers are one click away.
    assert [value.rpartition("from")[0] for value in values.values()] == ["16 buckets, the last "] * 4
    assert [numbers_in(value)[1] for value in values.values()] == [pytest.approx(float(each[-1]), rel=6e-3) for each in both]
    assert tab.is_hidden("[data-edges-table]")
    tab.click("details:has([data-edges-table]) summary")
    assert tab.locator("[data-edges-table] thead th").all_inner_texts() == ["bucket", *names]
    cells = [float(text) for text in tab.locator("[data-edges-table] td").all_inner_texts()]
    assert cells == [pytest.approx(float(x), rel=6e-3) for x in torch.stack(both, dim=1).flatten()]
    assert tab.locator("[data-edges] .edge.before").count() == 2 * 2 * 15
    tab.select_option("[data-edges-of]", label="t5")
    marks = tab.locator("[data-edges] .edge")
    assert [float(mark.get_attribute("data-edge")) for mark in marks.all()] == fixed[0, 0].tolist()
    assert tab.locator("[data-edges] .edge.before").count() == 0
    places = torch.tensor([float(mark.get_attribute("d")[1:].split()[0]) for mark in marks.all()])
    # Marks of the past go to the left by the logarithm of the distance.
    moved, wanted = places[0] - places, fixed[0, 0].log1p() - fixed[0, 0, 0].log1p()
    torch.testing.assert_close(moved / moved[-1], wanted / wanted[-1], atol=1e-3, rtol=0.0)


def test_a_browser_shows_kernels(opened):
    found = lens.spe_kernels(lagwise.SineSPE(heads=2, head_dim=8), 9)
    tab = opened(made(look(), kernels={"encoding": found}))
    assert tab.locator("[data-kernels] path[data-name]").count() == tab.locator("[data-kernels] path.band").count() == 2
    assert tab.is_hidden("[data-kernels-of]")
    tab.focus("[data-kernels] svg")
    for lag in (-1, -2):
        tab.keyboard.press("ArrowLeft")
        values = found.values[:, 8 + lag]
        wanted = torch.stack([values.mean(-1), *values.quantile(torch.tensor([0.25, 0.75]), dim=-1)], dim=1)
        title, values = told(tab, "kernels-value")
        assert title == f"lag {lag}:" and list(values) == ["layers 0, 1 · head 0", "layers 0, 1 · head 1"]
        assert numbers_in(" ".join(values.values())) == [approximately(x) for x in wanted.flatten()]


def test_a_browser_shows_other_lengths(opened):
    found = lens.Extrapolation(torch.tensor([20, 40]), torch.tensor([0.5, 0.25]), 0.75, {})
    tab = opened(made(look(), lengths=Lengths("test accuracy", found, 10)))
    tab.focus("[data-lengths] svg")
    for length, value in ((10, 0.75), (20, 0.5), (40, 0.25)):
        said = tab.inner_text("[data-lengths-value]")
        own = ", that of the training" if length == 10 else ""
        assert said == f"length {length}{own}: test accuracy {value}; at the length of the training 0.75"
        tab.keyboard.press("ArrowRight")
    points = [
        (float(dot.get_attribute("cx")), float(dot.get_attribute("cy"))) for dot in tab.locator("[data-lengths] circle").all()
    ]
    across, up = zip(*points, strict=True)
    assert (across[1] - across[0]) / (across[2] - across[0]) == pytest.approx(1 / 3)
    assert (up[1] - up[0]) / (up[2] - up[0]) == pytest.approx(0.5)
    assert tab.locator("[data-lengths] .mark").count() == 2


def test_a_browser_shows_a_model_without_a_bias_and_a_dark_page(opened):
    calls = look("rotary")
    tab = opened(made(calls))
    logit = lens.expected_logits([calls[0].parts()])["logit"]
    assert float(told(tab, "curve-value")[1]["mean logit (no bias)"]) == approximately(logit.mean[0].max())
    canvas = tab.locator("[data-map=priorScore] canvas")
    light, _ = brightness(canvas.screenshot())
    tab.emulate_media(color_scheme="dark")
    dark, _ = brightness(canvas.screenshot())
    assert dark == pytest.approx(255 - light, abs=25) and abs(light - dark) > 1
