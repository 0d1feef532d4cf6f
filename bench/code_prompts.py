"""Prompts out of what is at hand: what a Python function does and takes, over installed packages.

    python -m bench.code_prompts --out prompts.toml [--packages DIR] [--held-out click,jinja2,...]

Every Python package on a machine is full of functions with a signature and a docstring; they make tens of
thousands of prompts without any download. The file is what `remote_payload.tools.prepare` reads: topics are
packages, so that held-out prompts come from packages that no training prompt does. A function that occurs
twice with the same text (models copy each other's) is asked about once, a held-out one whose text stands in
another package too is left out, and vendored copies of packages are passed over.
"""

import argparse
import ast
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

HELD_OUT = ("click", "jinja2", "requests", "urllib3", "sortedcontainers", "tqdm", "anyio", "invoke")
"""Well-known packages of different kinds."""
LEAST_DOCSTRING = 30
"""Characters; a shorter one says too little to be asked about."""
QUESTIONS = {
    "explain": "Explain what this Python function does:",
    "arguments": "Describe the arguments and the result of this Python function:",
    "example": "Show a short example of how this Python function is called:",
    "pitfalls": "What can go wrong when this Python function is called?",
}
"""What is asked about a function, by kind."""
Functions = dict[str, list[str]]
"""Signatures with docstrings, by package."""
MOST_TEXT = 320
"""Characters of signature and docstring in a prompt: under 100 tokens."""


def functions(package: Path) -> Iterator[str]:
    """Source of signature and docstring's first paragraph of every documented function, once each."""
    files = sorted(package.rglob("*.py")) if package.is_dir() else [package]
    for file in files:
        name = file.relative_to(package.parent).as_posix().lower()
        if "test" in name or "_vendor" in name:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's strings
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := _head(node)):
                yield text


def _head(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    docstring = ast.get_docstring(node)
    if docstring is None or len(docstring) < LEAST_DOCSTRING:
        return None
    paragraph = docstring.split("\n\n")[0].strip()
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    body = paragraph.replace("\n", "\n    ")
    text = f'{kind} {node.name}({ast.unparse(node.args)}){returns}:\n    """{body}"""'
    return text if len(text) <= MOST_TEXT and _is_unicode(text) else None


def _is_unicode(text: str) -> bool:
    """Whether it can be written: source may name half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def collect(
    root: Path, held_out: Sequence[str], most: int, each: int, seed: int
) -> tuple[Functions, Functions]:
    """Functions by package: at most `most` to train on, and `each` of every held-out package.

    Raises ValueError when a held-out package is not under `root` or has too few functions.
    """
    by_package: dict[str, list[str]] = {}
    for package in sorted(root.iterdir()):
        if package.suffix in (".py", "") and not package.name.startswith(("_", ".")):
            found = list(dict.fromkeys(functions(package)))
            if found:
                by_package[package.stem] = found
    draw = random.Random(seed)
    asked = {}
    for name in held_out:
        others = {text for other, texts in by_package.items() if other != name for text in texts}
        own = [text for text in by_package.get(name, []) if text not in others]
        if len(own) < each:
            raise ValueError(f"{root}: {name} has {len(own)} documented functions of its own, not {each}")
        asked[name] = draw.sample(own, each)
    pool = [(name, text) for name, texts in by_package.items() if name not in held_out for text in texts]
    unique = list({text: (name, text) for name, text in pool}.values())
    draw.shuffle(unique)
    training: Functions = {}
    for name, text in unique[:most]:
        training.setdefault(name, []).append(text)
    return training, asked


def to_toml(training: Functions, asked: Functions) -> str:
    """The prompts file: every function is asked about in each way, a held-out one in one of them in turn."""
    lines = [f"held_out = {json.dumps(list(asked))}"]
    for number, (kind, question) in enumerate(QUESTIONS.items()):
        lines += ["", f"[prompts.{kind}]"]
        held = {name: texts[number :: len(QUESTIONS)] for name, texts in asked.items()}
        for name, texts in {**training, **held}.items():
            lines.append(f"{_string(name)} = [")
            lines += [f"  {_string(question + chr(10) * 2 + text)}," for text in texts]
            lines.append("]")
    return "\n".join(lines) + "\n"


def _string(text: str) -> str:
    """`text` as TOML: JSON's escapes, and DEL, which JSON leaves as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def main(argv: Sequence[str]) -> int:
    """Write the prompts file and say how many prompts it has."""
    parser = argparse.ArgumentParser(prog="python -m bench.code_prompts", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, default=Path(sysconfig.get_path("purelib")))
    parser.add_argument("--held-out", default=",".join(HELD_OUT), help="packages, by commas")
    parser.add_argument("--each", type=int, default=20, help="held-out functions of a package (20)")
    parser.add_argument("--most", type=int, default=40_000, help="most functions to train on (40,000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        training, asked = collect(
            arguments.packages,
            arguments.held_out.split(","),
            arguments.most,
            arguments.each,
            arguments.seed,
        )
    except ValueError as error:
        print(f"code_prompts: {error}", file=sys.stderr)
        return 2
    arguments.out.write_text(to_toml(training, asked), encoding="utf-8")
    counts = {name: len(prompts) for name, prompts in training.items()}
    print(f"{sum(counts.values())} functions of {len(counts)} packages to train on; the largest:")
    for name, count in sorted(counts.items(), key=lambda item: -item[1])[:8]:
        print(f"{count:>8} {name}")
    print(
        f"{sum(map(len, asked.values()))} held out, of {', '.join(asked)};"
        f" {len(QUESTIONS)} kinds of questions"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
