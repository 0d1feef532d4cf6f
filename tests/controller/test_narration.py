"""What is said on stderr beside the data."""

import pytest

from controller import narration
from controller.narration import Loudness


@pytest.fixture(autouse=True)
def verbose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narration, "_loudness", Loudness.VERBOSE)


def test_no_escape_sequence_is_said_whoever_it_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    narration.say("warning: gpubox: no\x1b[2J session\x9b1m")
    narration.detail("ssh gpubox '\x1b]0;owned\x07true'")
    narration.explain(ValueError("no\x1b[2J answer"))
    said = capsys.readouterr().err
    assert said == "warning: gpubox: no session\n+ ssh gpubox 'true'\nValueError: no answer\n"


def test_a_table_keeps_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    narration.say("KIND  NAME\nrun   a\n\nrun   b")
    narration.say("")
    assert capsys.readouterr().err == "KIND  NAME\nrun   a\n\nrun   b\n\n"
