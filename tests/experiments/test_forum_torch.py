"""The scripts about PyTorch's engines and TFLite's kernels hold their claims, emulated and with what is installed."""

import numpy as np
import pytest

from conformance.runtimes.torch_cpu import PYTHON
from experiments.forum import average_pool, by_hand, fbgemm_pairs, qat_convert, torch_programs, x585

SCRIPTS = [average_pool, by_hand, fbgemm_pairs, qat_convert, x585]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_average_pool(capsys):
    assert average_pool.main(["--emulate"]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    assert ["2x2", "1,021", "255", "382  -0.3746", "128  +0.1249", "0  -0.0005", "128  -0.0005"] in cells(text)
    assert ["avg_pool2d", "NCHW", "24,996", "not installed", "510 of 510", "510 of 510"] in cells(text)
    assert ["avg_pool2d", "NHWC", "24,996", "not installed", "510 of 510", "0 of 510"] in cells(text)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_fbgemm_pairs(capsys, tmp_path):
    assert fbgemm_pairs.main(["--emulate", "--figure", str(tmp_path / "pairs.png")]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    assert ["fbgemm, 8 bits", "0 2 0 0 0 2 0 1 1 2", "16 of 40", "3,329 of 32,000", "not installed"] in cells(text)
    assert ["119", "99", "218", "151"] in [row[:4] for row in cells(text)]
    assert 5_000 < (tmp_path / "pairs.png").stat().st_size < 100_000


def test_turns():
    y = np.array([[0, 5], [0, 4], [3, 4], [3, 9], [2, 9], [9, 1]])
    assert fbgemm_pairs.turns(y) == [2, 2]
    # rises by 200 - 50 up to code 163, where 163 * 200 = 32,600 still fits int16, and falls behind it
    assert fbgemm_pairs.pairs_of(np.array([100, 100, -25, -25])) == [(100, 100, 164), (-25, -25, None)]
    assert fbgemm_pairs.turns_of_weights(np.array([100, 100, -25, -25]), np.array([0, 255])) == 1
    assert fbgemm_pairs.turns_of_weights(np.array([100, 100, -25, -25]), np.array([0, 160])) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_by_hand(capsys):
    assert by_hand.main(["--emulate"]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    assert ["requantize, rule torch_qnnpack", "0", "80"] in cells(text)
    assert ["requantize, rule torch_fbgemm", "38", "0"] in cells(text)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_qat_convert(capsys):
    assert qat_convert.main(["--emulate"]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    assert ["qjax, exact forward - graph", "0", "0"] in cells(text)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arguments", [[], ["--emulate"]], ids=["living", "emulated"])
def test_x585(arguments, capsys):
    assert x585.main(arguments) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    assert "M0 = 1527099593, shift 6" in text
    assert ["LiteRT, reference", "CONV_2D", "-119", "0"] in [row[:4] for row in cells(text)]
    assert ["float32", "-119", "-120"] in cells(text)
    assert arguments or "ai-edge-litert" in text


@pytest.mark.exhaustive
def test_a_claim_that_fails_is_said(monkeypatch, capsys):
    monkeypatch.setattr(x585, "ACCUMULATOR", 586)
    assert x585.main(["--emulate"]) == 1
    assert "FAILED  as a float32 number it is 6.5" in capsys.readouterr().out


def test_without_pytorch_nothing_is_asked(monkeypatch):
    monkeypatch.delenv(PYTHON, raising=False)
    monkeypatch.setattr(torch_programs.importlib.util, "find_spec", lambda name: None)
    assert torch_programs.ask([{"program": "linear"}]) is None


@pytest.mark.oracle
@pytest.mark.parametrize("script", SCRIPTS[:-1], ids=lambda script: script.__name__.rpartition(".")[2])
def test_with_pytorch(script, capsys):
    assert script.main([]) == 0
    text = capsys.readouterr().out
    assert "torch 2." in text
    assert "FAILED" not in text
