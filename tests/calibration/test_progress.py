"""The progress bar stays off standard output, and out of logs."""

import time

import pytest

from qjax.calibration import track
from qjax.support import progress


@pytest.mark.parametrize("enabled", [None, False])
def test_silent_where_there_is_no_terminal(enabled: bool | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(range(5), "calibrating", enabled)) == [0, 1, 2, 3, 4]
    assert capsys.readouterr() == ("", "")


def test_on_standard_error_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track(iter("ab"), "calibrating", enabled=True)) == ["a", "b"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "calibrating" in err


def test_drawn_on_a_terminal_once_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert list(track([1], "calibrating")) == [1]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "_TICK", 0.01)
    for _ in track([1], "calibrating"):
        # the thread of the first call may still sleep for a whole tick of its own
        time.sleep(1.0)
    assert "calibrating" in capsys.readouterr().err


def test_one_item_is_taken_at_a_time() -> None:
    taken: list[int] = []
    tracked = track((taken.append(i) or i for i in range(3)), "calibrating", enabled=False)
    assert next(tracked) == 0
    assert taken == [0]
