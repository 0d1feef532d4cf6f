"""Prompts out of installed packages."""

from pathlib import Path

import pytest

from bench.code_prompts import QUESTIONS, collect, main, to_toml
from remote_payload.tools.prompts import read_prompts

LONG = "Return the sum of both numbers, or of their halves."


def write_package(root: Path, name: str, functions: dict[str, str]) -> None:
    (root / name).mkdir(parents=True)
    source = "\n".join(f'def {f}(a, b=1):\n    """{text}"""\n' for f, text in functions.items())
    (root / name / "code.py").write_text(source)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    packages = tmp_path / "packages"
    write_package(packages, "alpha", {f"add_{n}": LONG for n in range(5)} | {"short": "No."})
    write_package(packages, "beta", {f"sub_{n}": LONG for n in range(4)} | {"add_0": LONG})
    write_package(packages, "beta/_vendor/gamma", {"vendored": LONG})
    write_package(packages, "beta/tests", {"tested": LONG})
    return packages


def test_held_out_prompts_are_of_their_package_alone_and_stand_in_no_other(root: Path) -> None:
    training, asked = collect(root, ["alpha"], most=100, each=4, seed=0)
    assert set(training) == {"beta"}
    texts = "".join(asked["alpha"])
    assert len(asked["alpha"]) == 4
    assert "add_0" not in texts  # beta has the same function
    assert "short" not in texts


def test_tests_and_vendored_copies_are_passed_over(root: Path) -> None:
    training, _ = collect(root, ["alpha"], most=100, each=1, seed=0)
    assert not any("vendored" in text or "tested" in text for text in training["beta"])


def test_too_few_functions_of_a_held_out_package_are_refused_by_name(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--out", str(root / "x.toml"), "--packages", str(root), "--held-out", "nobody"])
    assert code == 2
    assert "nobody has 0 documented functions" in capsys.readouterr().err
    assert not (root / "x.toml").exists()


def test_text_that_toml_or_utf8_cannot_take_as_it_is_makes_no_bad_file(tmp_path: Path) -> None:
    texts = {
        "quoted": 'Say \\"hello\\" to everybody there, twice.',
        "half": "\\ud800 is half a pair, " + LONG,
    }
    texts["delete"] = "\\x7f and é and 漢 stand in this text. " + LONG
    write_package(tmp_path / "p", "alpha", texts)
    write_package(tmp_path / "p", "beta", {"f": LONG})
    training, asked = collect(tmp_path / "p", ["alpha"], most=3, each=2, seed=0)
    path = tmp_path / "prompts.toml"
    path.write_text(to_toml(training, asked), encoding="utf-8")
    held = [prompt.text for prompt in read_prompts(path) if prompt.held_out]
    assert sorted("quoted" in text for text in held) == [False, True]
    assert any("\x7f and é and 漢" in text for text in held)


def test_the_file_is_one_that_prepare_reads(root: Path, tmp_path: Path) -> None:
    training, asked = collect(root, ["alpha"], most=3, each=2, seed=1)
    path = tmp_path / "prompts.toml"
    path.write_text(to_toml(training, asked))
    prompts = read_prompts(path)
    assert [prompt.kind for prompt in prompts if prompt.held_out] == ["explain", "arguments"]
    assert len({prompt.text.split("\n", 2)[2] for prompt in prompts if prompt.held_out}) == 2
    assert sum(not prompt.held_out for prompt in prompts) == len(QUESTIONS) * 3
