"""Drafter layers that begin as layers of the target, and targets whose layers mean something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from remote_payload.job import JobError
from remote_payload.train.drafter import Drafter, DrafterConfig, initialise
from remote_payload.train.init_from_target import copy_layers
from remote_payload.train.target import Target, read_config
from tests.payload.test_target import write_target


def pair(folder: Path, family: str, layers: int = 2, **changes: object) -> tuple[Drafter, Target]:
    write_target(folder, family, **changes)
    target = Target.load(folder, (1, 3), device=torch.device("cpu"), dtype=torch.float32)
    config = DrafterConfig.for_target(
        read_config(folder), layers=layers, tap_layers=(1, 3), block_size=4, mask_token_id=66
    )
    drafter = Drafter(config)
    initialise(drafter, torch.Generator().manual_seed(0))
    return drafter, target


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_layers_and_the_final_norm_are_copied_and_the_rest_stays(tmp_path: Path, family: str) -> None:
    drafter, target = pair(tmp_path, family)
    fc = drafter.fc.weight.detach().clone()
    copy_layers(drafter, target, [3, 0])
    for mine, theirs in ((0, 3), (1, 0)):
        weights = dict(target.layers[theirs].named_parameters())
        copied = dict(drafter.layers[mine].named_parameters())
        assert len(weights) >= 9
        for name, value in weights.items():
            assert copied[name].equal(value), name
        for name in copied.keys() - weights.keys():  # Llama has no norms of heads
            assert "self_attn" in name and bool((copied[name] == 1).all())
    assert drafter.norm.weight.equal(target.model.get_decoder().norm.weight)
    assert drafter.fc.weight.equal(fc) and bool((drafter.hidden_norm.weight == 1).all())


def test_a_copied_layer_over_the_block_alone_is_the_targets_layer(tmp_path: Path) -> None:
    drafter, target = pair(tmp_path, "Qwen3", layers=1)
    copy_layers(drafter, target, [0])
    ids = torch.tensor([[5, 9, 11, 30]])
    with torch.no_grad():
        expected = target.model(input_ids=ids, output_hidden_states=True).hidden_states[1][0]
        x = target.embedding(ids)[0]
        nothing = drafter.context(torch.zeros(0, 48), torch.zeros(0, dtype=torch.long))[0]
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        rotary = drafter.rotary(torch.arange(4), torch.float32)
        torch.testing.assert_close(drafter.layers[0](x, rotary, *nothing, causal), expected)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Qwen2", r"has self_attn\.k_proj\.bias"),
        ("Gemma2", r"post_feedforward_layernorm"),
        ("Gemma3Text", r"post_feedforward_layernorm"),
        ("Gemma", r"another kind of input_layernorm"),
    ],
)
def test_layers_that_would_mean_something_else_are_refused(
    tmp_path: Path, family: str, expected: str
) -> None:
    drafter, target = pair(tmp_path, family)
    with pytest.raises(JobError, match=expected):
        copy_layers(drafter, target, [1, 2])


@pytest.mark.parametrize("layers", [[5, 0], [0, -1]])
def test_a_layer_that_the_target_does_not_have_is_refused_naming_those_it_has(
    tmp_path: Path, layers: list[int]
) -> None:
    drafter, target = pair(tmp_path, "Qwen3")
    with pytest.raises(JobError, match=r"names layer -?\d: the target has layers 0 to 4"):
        copy_layers(drafter, target, layers)
