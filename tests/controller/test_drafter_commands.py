"""`dflashctl export` and `evaluate` as a user runs them, on a real run of this machine, and the way back in.

One small run is trained to guess its target: the target's own answers, learned by heart, so that tau is well
above 1 and a wrong export would show.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from remote_payload.train.decode import Decoder
from remote_payload.train.target import Target
from tests.dflashctl import dflashctl
from tests.payload.tiny import job_values, random_samples, write_arrow, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Laptop:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, object] = {}
        (folder / "hosts.toml").write_text(f'[places.local]\nkind = "local"\nworkspace = "{folder / "w"}"\n')
        home = {f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("STATE", "DATA", "CONFIG")}
        self.env = {"HOME": str(folder), "OMP_NUM_THREADS": "1", "DFLASHCTL_TIME_SCALE": "1", **home}
        self.env["DFLASHCTL_HOSTS"] = str(folder / "hosts.toml")

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        done = dflashctl(*words, env=self.env, timeout=300)
        assert done.returncode == code, done.stderr
        return done.stdout.strip(), done.stderr

    def launch(self, name: str, **changes: object) -> str:
        path = self.folder / f"{name}.toml"
        path.write_text(tomli_w.dumps({**self.values, **changes}))
        out, _ = self.run("launch", "--job", str(path), "--follow")
        return out.splitlines()[0]


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Laptop:
    folder = tmp_path_factory.mktemp("laptop")
    laptop = Laptop(folder)
    model = Target.load(
        write_model(folder / "model"), (1, 2, 3), device=torch.device("cpu"), dtype=torch.float32
    )
    decoder = Decoder(model, {1}, 16)
    samples, lengths = random_samples(16, seed=3)
    prompts = [sample[:length] for sample, length in zip(samples, lengths, strict=True)]
    whole = [[*prompt, *decoder.plain(torch.tensor(prompt)).tokens] for prompt in prompts]
    values = job_values(folder, layers=2, steps=250, eval_every=250, learning_rate=3e-3, anchors=32)
    values["dataset"] = str(write_arrow(folder / "own.arrow", whole, lengths))
    values["held_out"] = str(write_arrow(folder / "own_held.arrow", whole[:6], lengths[:6], ["a", "b"] * 3))
    laptop.values = {**values, "bucket_edges": [0, 40, 90], "eval_prompts": 6, "eval_max_new_tokens": 12}
    return laptop


def test_a_run_is_exported_pulled_evaluated_both_ways_and_begun_from_again(laptop: Laptop) -> None:
    run = laptop.launch("first")
    run_dir = laptop.folder / "w" / "runs" / run
    to = laptop.folder / "here"
    out, said = laptop.run("export", run, "--dtype", "float32", "--name", "exact", "--to", str(to), "--json")
    exported = json.loads(out)
    assert exported["directory"] == str(to / "exports" / "exact") and exported["step"] == 250
    assert "logits of 4 blocks" in said
    here, there = to / "exports" / "exact", run_dir / "exports" / "exact"
    assert {path.name: path.read_bytes() for path in here.iterdir()} == {
        path.name: path.read_bytes() for path in there.iterdir()
    }
    written = load_file(here / "model.safetensors")
    trained = load_file(run_dir / "checkpoints" / "step-250" / "model.safetensors")
    assert all(written[name].equal(value) for name, value in trained.items())

    of_run = json.loads(laptop.run("evaluate", run, "--json")[0])
    assert of_run["tau"] == exported["tau"] > 1.3, "as the run itself measured it"
    assert of_run["text_equal"] == of_run["prompts"] == 6
    held = str(laptop.folder / "own_held.arrow")
    words = ("evaluate", str(here), "--prompts", held, "--max-new-tokens", "12", "--json")
    of_folder = json.loads(laptop.run(*words)[0])
    same = ("tau", "tau_macro", "acceptance", "conditional_acceptance", "rounds", "tokens", "by_kind", "step")
    assert {key: of_folder[key] for key in same} == {key: of_run[key] for key in same}
    assert [t["rounds"] for t in of_folder["texts"]] == [t["rounds"] for t in of_run["texts"]]

    out, _ = laptop.run("evaluate", run, "--count", "2", "--device", "cpu")
    assert out.startswith("tau ") and "speed-up" in out and "conditional" in out

    again = laptop.launch("again", init_from=str(here), steps=1, learning_rate=1e-9)
    events = (laptop.folder / "w" / "runs" / again / "events.jsonl").read_text().splitlines()
    first = next(record for record in map(json.loads, events) if record["kind"] == "eval")
    assert (first["step"], first["tau"]) == (0, of_run["tau"])

    out, said = laptop.run("export", run, "--checkpoint", "step-7", "--no-pull", code=83)
    assert out == "" and said.splitlines()[-1].endswith("expected last, best or one of step-250")
    out, said = laptop.run("export", run, "--name", "exact", "--no-pull", code=83)
    assert "exports/exact exists already (of step 250, float32)" in said
    out, _ = laptop.run("export", run, "--name", "exact", "--no-pull", "--force")
    assert out == f"{there} on local"
    assert json.loads((there / "config.json").read_text())["dtype"] == "bfloat16"
    out, said = laptop.run("evaluate", str(here), "--prompts", "nothing.arrow", code=64)
    assert "--prompts nothing.arrow: there is no such file" in said
    out, said = laptop.run("evaluate", run, "--host", "local", code=64)
    assert "a run is evaluated where it is" in said
