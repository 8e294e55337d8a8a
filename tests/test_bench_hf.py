"""`lagwise bench hf` on tiny models: its lines are complete, its check can fail, and its baseline is transformers 4."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from test_hf_bert import STORED, recipe, relative
from transformers import BertForMaskedLM, T5EncoderModel, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention
from typer.testing import CliRunner

from lagwise.extras import install_command
from lagwise.hf.bert import self_attentions
from lagwise.lab.bench import hf as bench
from lagwise.lab.bench import timing
from lagwise.lab.bench.hf import BERT_4, FLOOR, Answer, ModelBatch, ModelCase
from lagwise.lab.bench.timing import Measured
from lagwise.lab.cli import app

CPU = torch.device("cpu")
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
# So narrow a BERT has its usual initial weights' effects with larger ones.
BERT = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "initializer_range": 0.2,
}  # fmt: skip
TINY = {"t5": (T5ForConditionalGeneration, T5), "t5-encoder": (T5EncoderModel, T5), "bert": (BertForMaskedLM, BERT)}
CONTENDERS = {
    "t5": ["eager", "sdpa", "lagwise", FLOOR],
    "t5-encoder": ["eager", "sdpa", "lagwise", FLOOR],
    "bert": [BERT_4, "sdpa", "lagwise"],
}

# The profiler, which counts memory, warns of its own changes.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "MODELS", TINY)
    cases = [ModelCase(name, 2, 12, dropout, goal=1e-9) for name in TINY for dropout in (0.0, 0.1)]
    monkeypatch.setitem(bench.CASES, "cpu", cases)


@pytest.fixture
def unweighed(monkeypatch):
    """Spares a test the profiler, which takes most of its time."""
    monkeypatch.setattr(timing, "peak_memory", lambda function, device: 1)


def run(name: str, **options) -> dict[str, dict]:
    case = options.pop("case", ModelCase(name, 2, 12, 0.1, goal=1e-9, memory_goal=1e9))
    records = bench.measure_model(case, device=CPU, dtype=torch.float32, repeats=1, **options)
    return {record["contender"]: record for record in records}


def invoke(folder, *options: str):
    return CliRunner().invoke(app, ["bench", "hf", "--device", "cpu", "--repeats", "1", "--out", str(folder), *options])


def read_lines(folder) -> list[dict]:
    (path,) = folder.glob("hf-cpu-*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("unweighed")
def test_the_command_prints_a_table_and_saves_its_numbers(tmp_path):
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    assert "met" in result.output and "bert, dropout 0.1" in result.output and "saved to" in result.output
    lines = read_lines(tmp_path)
    assert [(line["model"], line["dropout"], line["contender"]) for line in lines] == [
        (name, dropout, contender) for name in TINY for dropout in (0.0, 0.1) for contender in CONTENDERS[name]
    ]
    for line in lines:
        assert line["bench"] == "hf" and line["dtype"] == "float32" and line["torch"] == torch.__version__
        assert line["transformers"] and "triton" in line and line["commit"] and line["date"] and line["device"]
        assert line["tokens"] == (48 if line["model"] == "t5" else 24)
        for kind in ("training", "inference"):
            assert line[f"{kind}_tokens_per_s"] == pytest.approx(1000 * line["tokens"] / line[f"{kind}_ms"])
            assert line[f"{kind}_speedup"] > 0
        compared = line["contender"] != ("sdpa" if line["model"] == "bert" else FLOOR)
        assert (line["floor_ratio"] is None) == (line["model"] == "bert")
        assert (line["output_difference"] is not None) == (line["loss_difference"] is not None) == compared
        assert ("logits_share" in line) == (line["model"] != "t5-encoder")
        assert line["goal_met"] is (True if line["contender"] == "lagwise" else None)


@pytest.mark.usefixtures("unweighed")
def test_the_options_choose_cases_and_shapes(tmp_path):
    result = invoke(tmp_path, "--case", "bert", "--case", "t5-encoder", "--batch", "1", "--time", "5", "--quick")
    assert result.exit_code == 0, result.output
    lines = read_lines(tmp_path)
    assert {(line["model"], line["contender"]) for line in lines} == {
        ("bert", BERT_4), ("bert", "lagwise"), ("t5-encoder", "sdpa"), ("t5-encoder", "lagwise"), ("t5-encoder", FLOOR),
    }  # fmt: skip
    assert all(line["batch"] == 1 and line["time"] == 5 and line["goal"] is line["goal_met"] is None for line in lines)


def test_a_case_that_is_not_there_is_refused(tmp_path):
    result = invoke(tmp_path, "--case", "t6")
    assert result.exit_code == 2 and "t5-encoder" in result.output
    result = invoke(tmp_path, "--shape", "B3 T12")
    assert result.exit_code == 2 and "there are B2 T12" in result.output


def test_help_teaches():
    result = CliRunner().invoke(app, ["bench", "hf", "--help"])
    assert result.exit_code == 0 and "transformers 4" in result.output and "--quick" in result.output


def test_memory_has_weights_gradients_and_logits():
    record = run("t5", quick=True)["lagwise"]
    weights = sum(x.numel() * 4 for x in bench.make_models(ModelCase("t5", 2, 12), CPU, torch.float32)["sdpa"].parameters())
    assert record["logits_bytes"] == 2 * 12 * 40 * 4
    assert record["held_bytes"] > record["peak_bytes"] + weights and record["peak_bytes"] > weights + record["logits_bytes"]
    assert record["logits_share"] == record["logits_bytes"] / record["held_bytes"]
    assert record["memory_ratio"] > 0 and record["memory_goal_met"] is True


@pytest.mark.parametrize("name", TINY)
def test_contenders_share_their_weights(name):
    models = bench.make_models(ModelCase(name, 2, 12), CPU, torch.float32)
    ours = {x.data_ptr() for x in models["lagwise"].parameters()}
    for model in models.values():
        assert {x.data_ptr() for x in model.parameters()} <= ours
    for contender, model in models.items():
        asked = {module.config._attn_implementation for module in model.modules() if isinstance(module, T5Attention)}
        assert asked <= {"sdpa" if contender == FLOOR else contender}


@pytest.mark.parametrize("name, calls", [("t5", 3), ("t5-encoder", 1)])
def test_the_model_without_positions_has_neither_a_bias_nor_a_mask(name, calls, monkeypatch):
    case, seen = ModelCase(name, 2, 12), []
    batch, models = bench.make_batch(case, CPU), bench.make_models(case, CPU, torch.float32)
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, v, attn_mask=None, is_causal=False, **options):
        seen.append((attn_mask is None, is_causal))
        return attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    found = bench.answer(models[FLOOR], batch)
    # Two layers each of the encoder, of the decoder, which alone is causal, and across.
    assert len(seen) == 2 * calls and all(unmasked for unmasked, _ in seen)
    assert sum(causal for _, causal in seen) == (2 if name == "t5" else 0)
    monkeypatch.undo()
    for label, weight in models["sdpa"].named_parameters():
        if "relative_attention_bias" in label:
            torch.nn.init.zeros_(weight)
    torch.testing.assert_close(found.output, bench.answer(models["sdpa"], batch).output)


def test_training_draws_dropout_and_inference_does_not():
    case = ModelCase("bert", 2, 12, 0.5)
    batch, models = bench.make_batch(case, CPU), bench.make_models(case, CPU, torch.float32)
    for model in models.values():
        first, second = (model.train()(**batch.inputs).logits for _ in range(2))
        assert not torch.equal(first, second)
        assert bench.answer(model, batch).loss == bench.answer(model, batch).loss


def written_out(model):
    for name, layer in list(self_attentions(model)):
        model.set_submodule(name, bench.WrittenOut(layer))
    return model


def test_the_baseline_is_transformers_4():
    """The fixture's first row has no padding."""
    model = written_out(relative("relative_key_query").double())
    recipe.fill(model)
    states = model(recipe.TOKENS[:1]).last_hidden_state[0]
    expected = torch.tensor(STORED["relative_key_query"]["states"], dtype=torch.float64)[: len(states)]
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-6)


def test_the_baseline_is_ours_with_its_gradients():
    case = ModelCase("bert", 2, 12)
    batch, models = bench.make_batch(case, CPU), bench.make_models(case, CPU, torch.float64)
    weights = list(models["lagwise"].parameters())
    expected, found = (
        torch.autograd.grad(
            models[name].eval()(**batch.inputs, labels=batch.labels).loss, weights, allow_unused=True, materialize_grads=True
        )
        for name in (BERT_4, "lagwise")
    )
    assert sum(bool(gradient.any()) for gradient in found) > len(weights) // 2
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("long", [4096, 1])
def test_the_baseline_refuses_padding(long, monkeypatch):
    monkeypatch.setattr("lagwise.hf.masks.LONG", long)
    model = written_out(relative("relative_key_query"))
    with pytest.raises(ValueError, match="knows no padding"):
        model(recipe.TOKENS, attention_mask=recipe.MASK)


@pytest.mark.parametrize("name", TINY)
def test_a_contender_that_computes_something_else_ends_the_run(name, monkeypatch):
    make_models = bench.make_models

    def without_positions(case, device, dtype):
        models = make_models(case, device, dtype)
        models["lagwise"] = bench.deepcopy(models["lagwise"])
        for label, weight in models["lagwise"].named_parameters():
            if "relative_attention_bias" in label or "distance_embedding" in label:
                torch.nn.init.zeros_(weight)
        return models

    monkeypatch.setattr(bench, "make_models", without_positions)
    with pytest.raises(RuntimeError, match="lagwise must compute the same as"):
        run(name)


@pytest.mark.parametrize("loss, output", [(float("nan"), 1.0), (1.1, 1.0), (1.0, 1.1), (1.0, float("nan"))])
def test_answers_must_agree(loss, output):
    expected = Answer(1.0, torch.ones(3))
    assert bench.differences("a", expected, "b", expected, bounds=(0.01, 0.01)) == {"loss_difference": 0, "output_difference": 0}
    with pytest.raises(RuntimeError, match="a must compute the same as b"):
        bench.differences("a", Answer(loss, torch.full((3,), output)), "b", expected, bounds=(0.01, 0.01))


def out_of_memory(*inputs, **options):
    raise torch.OutOfMemoryError("CUDA out of memory.\n  Tried to allocate 96 GiB")


@pytest.mark.usefixtures("unweighed")
@pytest.mark.parametrize("failing", ["eager", "sdpa", FLOOR])
def test_a_contender_without_memory_is_a_line_that_says_so(failing, monkeypatch, tmp_path):
    training_step, make_models, made = bench.training_step, bench.make_models, {}

    def models(*arguments):
        made.update(make_models(*arguments))
        return dict(made)

    def steps(model, batch):
        return out_of_memory if model is made[failing] else training_step(model, batch)

    monkeypatch.setattr(bench, "make_models", models)
    monkeypatch.setattr(bench, "training_step", steps)
    result = invoke(tmp_path, "--case", "t5-encoder")
    assert result.exit_code == 0 and "OutOfMemoryError: CUDA out of memory." in result.output
    for line in read_lines(tmp_path):
        assert ("error" in line) == (line["contender"] == failing) != ("training_ms" in line)
        if line["contender"] == "lagwise":
            assert (line["training_speedup"] is None) == (line["memory_ratio"] is None) == (failing == "sdpa")
            assert line["goal_met"] is (None if failing == "sdpa" else True)
            assert (line["floor_ratio"] is None) == (failing == FLOOR)


@pytest.mark.usefixtures("unweighed")
def test_a_contender_that_does_not_answer_is_not_measured(monkeypatch):
    answer = bench.answer

    def answers(model, batch):
        return out_of_memory() if model.config._attn_implementation == "sdpa" else answer(model, batch)

    monkeypatch.setattr(bench, "answer", answers)
    records = run("t5")
    assert "OutOfMemoryError" in records["sdpa"]["error"] and records["sdpa"]["goal_met"] is None
    # Then the next one is what the others are compared to.
    assert records["eager"]["output_difference"] == 0.0 and records["lagwise"]["output_difference"] < 1e-4


def test_goals_are_held_against_the_anchor_in_the_same_turn():
    case = ModelCase("t5", 2, 12, goal=3.0, memory_goal=0.5, floor_goal=1.25)
    batch = ModelBatch({"input_ids": torch.zeros(2, 50, dtype=torch.long)}, None)
    training = {
        "sdpa": Measured([4.0, 8.0, 4.0], 900), "lagwise": Measured([1.0, 2.0, 1.0], 400), FLOOR: Measured([0.8, 1.6, 0.8], 400),
    }  # fmt: skip
    numbers = bench.numbers_of(case, batch, training, training, dict.fromkeys(training, 100))
    ours = numbers["lagwise"]
    assert ours["training_speedup"] == 4.0 and ours["training_tokens_per_s"] == 100.0 and ours["memory_ratio"] == 0.5
    assert ours["floor_ratio"] == 1.25 and numbers["sdpa"]["floor_ratio"] == 5.0
    names = ("goal_met", "memory_goal_met", "floor_goal_met")
    assert bench.goals_met(case, "lagwise", ours) == dict.fromkeys(names, True)
    stricter = replace(case, goal=4.1, memory_goal=0.49, floor_goal=1.24)
    assert bench.goals_met(stricter, "lagwise", ours) == dict.fromkeys(names, False)
    assert bench.goals_met(case, "sdpa", numbers["sdpa"]) == dict.fromkeys(names)
    assert bench.goals_met(case, "lagwise", {"error": "it failed"}) == dict.fromkeys(names)


def test_the_cases_on_a_gpu_are_those_of_the_goals():
    cases = bench.CASES["cuda"]
    found = {(case.model, case.shape, case.dropout): (case.goal, case.memory_goal) for case in cases}
    expected = {
        ("t5-base", "B8 T4096"): (3.0, 0.5),
        ("t5-base", "B2 T4096"): (3.0, 0.5),
        ("t5-base-encoder", "B8 T4096"): (None, None),
        ("bert-base-m4", "B32 T512"): (5.0, None),
    }
    short = {("t5-base", shape, 0.0): (None, None) for shape in ("B64 T64", "B32 T128", "B16 T512", "B4 T2048")}
    assert found == short | {(*name, dropout): goals for name, goals in expected.items() for dropout in (0.0, 0.1)}
    floors = {(case.shape, case.dropout): case.floor_goal for case in cases if case.floor_goal}
    assert floors == {(shape, 0.0): 1.15 for _, shape, _ in [*short, (None, "B2 T4096", None)]}


def test_without_transformers_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.delattr("lagwise.lab.bench.hf")
    monkeypatch.delitem(sys.modules, "lagwise.lab.bench.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke(tmp_path)
    assert result.exit_code == 1 and f"needs transformers: {install_command('hf')}" in result.output
