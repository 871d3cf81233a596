"""The two scripts about TVM's roundings hold their claims, with qjax's own rules and with what is installed."""

import pytest

from experiments.forum import proposed_fix, tvm_two_paths


def test_two_paths(capsys):
    assert tvm_two_paths.main(["--emulate"]) == 0
    text = capsys.readouterr().out
    assert "Of the 4,096 outputs that both layers compute 19 differ, 8 after the clamp" in " ".join(text.split())
    assert "FAILED" not in text


@pytest.mark.exhaustive
def test_proposed_fix(capsys):
    assert proposed_fix.main(["--emulate"]) == 0
    text = capsys.readouterr().out
    assert ["product is a tie", "14,304", "0", "0", "7,152"] in [
        [cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines()
    ]
    assert "FAILED" not in text


def test_a_claim_that_fails_is_said(monkeypatch, capsys):
    monkeypatch.setattr(tvm_two_paths, "carried", lambda acc, constants: acc == 0)
    assert tvm_two_paths.main(["--emulate"]) == 1
    assert "FAILED  exactly where a carry" in capsys.readouterr().out


@pytest.mark.oracle
@pytest.mark.parametrize("script", [tvm_two_paths, proposed_fix])
def test_with_the_living_runtimes(script, capsys):
    assert script.main([]) == 0
    assert "qemu" in capsys.readouterr().out
