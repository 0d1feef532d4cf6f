"""The target's norms by one kernel: only those that compute the same, and then the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from remote_payload.train.fused_norms import fuse_norms
from remote_payload.train.target import Target
from tests.payload.tiny import write_model


def filled(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    assert isinstance(norm.weight, nn.Parameter)
    norm.weight.data = torch.randn(norm.weight.shape, generator=generator)
    return norm


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, LlamaRMSNorm])
def test_a_plain_norm_is_fused_and_computes_what_it_did(kind: type[nn.Module]) -> None:
    fused, plain = (nn.Sequential(filled(kind(24, eps=1e-5))) for _ in range(2))
    assert fuse_norms(fused) == 1
    for scale in (1.0, 1e-3, 100.0):
        x = torch.randn(2, 7, 24) * scale
        torch.testing.assert_close(fused(x), plain(x))
    narrow = [model.to(torch.bfloat16)(x.bfloat16()) for model in (fused, plain)]
    assert narrow[0].dtype == torch.bfloat16
    torch.testing.assert_close(narrow[0], narrow[1], rtol=2**-6, atol=0.0)


def test_a_norm_that_multiplies_by_one_plus_weight_stays_as_it_is() -> None:
    model = nn.Sequential(filled(Gemma3RMSNorm(24)))
    before = model(torch.ones(2, 24) * 3)
    assert fuse_norms(model) == 0
    assert model(torch.ones(2, 24) * 3).equal(before)


def test_a_norm_that_wants_other_input_stays_as_it_is() -> None:
    class GatedRMSNorm(Qwen3RMSNorm):
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * gate

    assert fuse_norms(nn.Sequential(GatedRMSNorm(24))) == 0


def test_a_whole_target_has_the_features_it_had(tmp_path: object) -> None:
    from pathlib import Path

    folder = write_model(Path(str(tmp_path)) / "model")
    plain, fused = (
        Target.load(folder, (1, 3), device=torch.device("cpu"), dtype=torch.float32) for _ in range(2)
    )
    layers = 6
    assert fuse_norms(fused.model) == 4 * layers + 1  # two of each layer, those of queries and keys, the last
    ids = torch.randint(2, 90, (2, 11))
    torch.testing.assert_close(fused.features(ids), plain.features(ids))
