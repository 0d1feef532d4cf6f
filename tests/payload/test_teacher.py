"""The target's distribution as objectives read it: the right row for every block place, and the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from remote_payload.job import JobError
from remote_payload.train.batch import Batch, BatchMaker, RowShape
from remote_payload.train.dataset import Dataset
from remote_payload.train.features import pack
from remote_payload.train.objective import Objective, block_loss
from remote_payload.train.target import Target
from tests.payload.tiny import MASK, VOCABULARY, random_samples, write_arrow, write_model

SHAPE = RowShape(token_budget=256, anchors=24, block_size=5, mask_token_id=MASK, gamma=4.0)
CPU = torch.device("cpu")
TAPS = (1, 2)


def write_gemma(folder: Path) -> Path:
    """A target with a soft cap low enough to matter."""
    torch.manual_seed(1)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        final_logit_softcapping=1.5,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Gemma2ForCausalLM(config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(30)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen3", "gemma2"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("teacher")
    written = write_model(folder) if request.param == "qwen3" else write_gemma(folder)
    return Target.load(written, TAPS, device=CPU, dtype=torch.float32)


def batch_of(folder: Path) -> Batch:
    """A row of four documents of different lengths, with short tails and slots to spare."""
    samples, prompts = random_samples(4, low=14, high=40)
    dataset = Dataset.open(write_arrow(folder / "a.arrow", samples, prompts), folder)
    maker = BatchMaker(dataset, SHAPE, seed=0, vocabulary=VOCABULARY, pad_id=0)
    return maker.make(np.arange(4), 0, 0, 0)


def row_of(target: Target, batch: Batch) -> Tensor:
    """The target's last hidden states as a replica has them: packed, zeros after them."""
    packed = pack(target.features(batch.ids, last_hidden=True), batch.lengths)
    width = target.output.weight.shape[1]
    assert packed.shape[1] == (len(TAPS) + 1) * width
    row = torch.zeros(SHAPE.token_budget, width)
    row[: len(packed)] = packed[:, -width:]
    return row


def test_taps_are_the_same_with_and_without_the_last_hidden_states(target: Target, tmp_path: Path) -> None:
    ids = batch_of(tmp_path).ids
    both = target.features(ids, last_hidden=True)
    alone = target.features(ids)
    assert both[..., : alone.shape[-1]].equal(alone) and not both.requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Objective(name="forward_kl"), Objective(name="lk")], ids=lambda k: k.name)
def test_a_drafter_that_says_what_the_target_says_before_each_label_has_no_loss(
    target: Target, tmp_path: Path, kind: Objective
) -> None:
    batch = batch_of(tmp_path)
    row, teacher = batch.row, row_of(target, batch)
    starts = np.cumsum([0, *batch.lengths])
    hidden = torch.zeros(SHAPE.anchors, SHAPE.block_size, teacher.shape[1])
    for slot in range(batch.drawn):
        document = int(np.searchsorted(starts, int(row.anchors[slot]), "right")) - 1
        ids = batch.ids[document, : batch.lengths[document]]
        anchor = int(row.anchors[slot]) - int(starts[document])
        # What the target itself has read when it chooses the label at anchor + k: everything before it.
        for k in range(1, SHAPE.block_size):
            if row.weights[slot, k - 1] > 0:
                assert ids[anchor + k] == row.labels[slot, k - 1]
                read = target.features(ids[None, : anchor + k], last_hidden=True)
                hidden[slot, k] = read[0, -1, -teacher.shape[1] :]
    arguments = (target.output, row.labels, row.weights, row.anchors, teacher, kind)
    right = block_loss(hidden[:, 1:], *arguments)
    assert 0 <= float(right.loss) + 1e-4 < 1e-3 * float(right.weight)
    wrong = block_loss(hidden.roll(1, 1)[:, 1:], *arguments)  # a place too late
    assert float(wrong.loss) > 20 * abs(float(right.loss)) + 1e-3 * float(wrong.weight)


def test_the_distribution_is_the_models_own_with_its_soft_cap(target: Target, tmp_path: Path) -> None:
    batch = batch_of(tmp_path)
    hidden = target.features(batch.ids, last_hidden=True)[..., -target.output.weight.shape[1] :]
    with torch.no_grad():
        own = target.model(input_ids=batch.ids).logits
    torch.testing.assert_close(target.output.logits(hidden), own, atol=1e-5, rtol=1e-4)
    if target.output.soft_cap is not None:
        bare = F.linear(hidden, target.output.weight)
        assert (bare.softmax(-1) - own.softmax(-1)).abs().max() > 0.05  # it would have been another one


def test_a_model_whose_head_is_given_something_else_is_refused(tmp_path: Path) -> None:
    target = Target.load(write_model(tmp_path / "model"), TAPS, device=CPU, dtype=torch.float32)
    target.check_last_hidden()

    def halved(_module: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0] * 0.5,)

    target.model.get_output_embeddings().register_forward_pre_hook(halved)
    with pytest.raises(JobError, match="'qwen3': its decoder's output is not what its head is given"):
        target.check_last_hidden()
