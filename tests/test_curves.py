"""Curves from the folders of runs."""

import json

import pytest
import torch

from lagwise.lab import curves


def test_extrapolation_tells_values_and_refusals():
    result = {
        "test": {"loss": 0.5, "accuracy": 0.9},
        "lengths": {"400": {"loss": 0.8, "accuracy": 0.6}, "100": {"loss": 0.6, "accuracy": 0.8}, "999": {"refused": "too long"}},
    }
    found = curves.extrapolation(result, "accuracy")
    assert found.lengths.tolist() == [100, 400]
    torch.testing.assert_close(found.values, torch.tensor([0.8, 0.6]).double())
    assert found.trained == 0.9 and found.refused == {999: "too long"}
    with pytest.raises(ValueError, match="metric must be one of loss, accuracy, but is 'f1'"):
        curves.extrapolation(result, "f1")
    with pytest.raises(ValueError, match="has none: run with --lengths"):
        curves.extrapolation({**result, "lengths": {}}, "loss")


def test_losses_by_position_are_the_latest(tmp_path):
    with pytest.raises(ValueError, match="has no losses by position"):
        curves.losses_by_position(tmp_path)
    lines = [
        {"split": "test", "length": None, "loss": 1.0, "loss_by_position": [[0, 2.0, 5]]},
        {"split": "test", "length": None, "loss": 1.0, "loss_by_position": [[0, 3.0, 5], [8, 1.5, 4]]},
        {"split": "test", "length": 64, "refused": "too long"},
        {"split": "validation", "length": 64, "loss": 1.0, "loss_by_position": [[0, 9.0, 1]]},
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = curves.losses_by_position(tmp_path)
    assert list(found) == [None]
    assert found[None].positions.tolist() == [0, 8] and found[None].nats.tolist() == [3.0, 1.5]


def test_styles_by_quarter_are_rows_of_pieces(tmp_path):
    for number, style in enumerate([{"time-pitch": [0.1, 0.2, 0.3, 0.4], "onset-drum": [1, 1, 1, 1]}, {"time-pitch": [0.5] * 4}]):
        (tmp_path / f"piece-{number}.json").write_text(json.dumps({"style_by_quarter": style}))
    found = curves.styles_by_quarter(sorted(tmp_path.glob("*.json")))
    assert found["time-pitch"].shape == (2, 4) and found["onset-drum"].shape == (1, 4)
    with pytest.raises(ValueError, match="generated from a prompt"):
        curves.styles_by_quarter([])


def test_losses_by_position_of_a_result(tmp_path):
    stored = {"own": {"loss_by_position": [[0, 2.0, 5]]}, "64": {"loss_by_position": [[0, 3.0, 5], [8, 1.5, 4]]}, "9": {}}
    (tmp_path / "result.json").write_text(json.dumps({"curves": stored}))
    found = curves.losses_by_position(tmp_path)
    assert list(found) == [None, 64] and found[64].nats.tolist() == [3.0, 1.5]
    line = {"split": "test", "length": 64, "loss_by_position": [[0, 7.0, 5]]}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    assert curves.losses_by_position(tmp_path)[64].nats.tolist() == [7.0]
    with pytest.raises(ValueError, match="no losses by position of split 'validation'"):
        curves.losses_by_position(tmp_path, "validation")
