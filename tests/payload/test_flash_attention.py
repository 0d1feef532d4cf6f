"""FlashAttention-4 under the training mask: our half of it here, its kernels on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from remote_payload.job import JobError
from remote_payload.train import attention_choice, execution, flash_attention
from remote_payload.train.attention_choice import choose_attention, flash_errors
from remote_payload.train.attention_gate import (
    BOUND,
    NAMES,
    Trial,
    exact,
    random_anchors,
    refusal,
    tile_error,
)
from remote_payload.train.drafter import attend
from remote_payload.train.mask import TILE, dense_mask
from remote_payload.train.row_mask import DENSE, FLASH, FLEX, AttentionSizes, RowMask
from tests.payload import flash_stand_in
from tests.payload.test_mask import Packed, packed_rows

CPU = torch.device("cpu")


def sizes_of(row: Packed, heads: int, kv_heads: int, head_dim: int = 16) -> AttentionSizes:
    return AttentionSizes(
        context=row.context,
        anchors=row.slots,
        block_size=row.block,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def small(**changes: int) -> AttentionSizes:
    given = {"context": 256, "anchors": 32, "block_size": 8, "heads": 4, "kv_heads": 2, "head_dim": 16}
    return AttentionSizes(**given | changes)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention, "_module", flash_stand_in.module)
    flash_attention._rule.cache_clear()


def random_inputs(sizes: AttentionSizes) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    keys = sizes.context + sizes.queries

    def normal(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, sizes.head_dim, generator=generator).requires_grad_()

    return normal(sizes.queries, sizes.heads), normal(keys, sizes.kv_heads), normal(keys, sizes.kv_heads)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_lists_and_rule_give_the_package_the_mask_in_both_directions(heads: int, kv_heads: int) -> None:
    @settings(deadline=None, max_examples=5)
    @given(row=packed_rows(context=2 * TILE, slots=32, block=8))
    def holds(row: Packed) -> None:
        starts, anchors = row.tensors()
        sizes = sizes_of(row, heads, kv_heads)
        inputs = random_inputs(sizes)
        slope = torch.randn(sizes.queries, heads, sizes.head_dim)
        found = []
        for kind in (FLASH, DENSE):
            out = attend(*inputs, RowMask(starts, anchors, sizes, kind).make())
            found.append([out, *torch.autograd.grad(out, inputs, slope)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)

    holds()


@given(row=packed_rows(context=2 * TILE, slots=32, block=8))
@settings(deadline=None, max_examples=20)
def test_the_rule_asks_of_folded_places_what_the_mask_says_of_plain_ones(row: Packed) -> None:
    starts, anchors = row.tensors()
    sizes = sizes_of(row, 4, 2)
    folded = RowMask(starts, anchors, sizes, FLEX).make()
    query, key = torch.meshgrid(
        torch.arange(0, 2 * TILE * 4, 37), torch.arange(0, 4 * TILE * 2, 5), indexing="ij"
    )
    sees = flash_attention.seen(
        query, key, lambda of: (starts[of], anchors[of]), sizes.queries, (row.context, row.block, 4, 2)
    )
    same_head = (query // TILE % 4) // 2 == key // TILE % 2
    zero = torch.zeros(())
    assert (sees & same_head).equal(folded.mask_mod(zero, zero, query, key))  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.usefixtures("stand_in")
def test_a_compiler_keeps_both_operators_whole_and_a_refilled_row_is_no_new_graph() -> None:
    sizes = small()
    starts, anchors = random_anchors(sizes, 2)
    row_mask = RowMask(starts, anchors, sizes, FLASH)
    inputs = random_inputs(sizes)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return attend(q, k, v, mask)

    torch._dynamo.reset()
    before = execution.compiled_graphs()
    compiled = torch.compile(run, fullgraph=True, dynamic=False, backend="aot_eager")
    for _ in range(2):
        out = compiled(*inputs, row_mask.make())
        wanted = attend(*inputs, dense_mask(starts, anchors, sizes.context, sizes.block_size))
        slope = torch.randn_like(out)
        pairs = [(result, *torch.autograd.grad(result, inputs, slope)) for result in (out, wanted)]
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
        anchors.div_(2, rounding_mode="floor")
        starts.clamp_(max=0)
    assert execution.compiled_graphs() == before + 1
    torch._dynamo.reset()


def test_operators_keep_the_rules_of_torch_for_operators(stand_in: None) -> None:
    """Shapes and types that the compiler is told, no aliasing, no mutation."""
    sizes = small()
    mask = RowMask(*random_anchors(sizes, 2), sizes, FLASH).make()
    assert isinstance(mask, flash_attention.FlashMask)
    q = torch.randn(1, sizes.queries * 4, 1, 16, requires_grad=True)
    k, v = (torch.randn(1, (sizes.context + sizes.queries) * 2, 1, 16, requires_grad=True) for _ in "kv")
    given = (q, k, v, *mask.by_query, *mask.by_key, mask.starts, mask.anchors, mask.sizes)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.dflash.flash_forward.default, given, test_utils=checks)


def test_exact_results_are_those_of_autograd() -> None:
    sizes = small(block_size=8, anchors=16, context=128)
    starts, anchors = random_anchors(sizes, 2)
    mask = dense_mask(starts, anchors, sizes.context, sizes.block_size)
    inputs = random_inputs(sizes)
    slope = torch.randn(sizes.queries, sizes.heads, sizes.head_dim)
    out = attend(*inputs, mask)
    wanted = [out, *torch.autograd.grad(out, inputs, slope)]
    with torch.no_grad():
        for one, other in zip(exact(*inputs, slope, mask), wanted, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_random_anchors_are_those_of_a_row() -> None:
    sizes = small(anchors=64, context=512)
    starts, anchors = random_anchors(sizes, 3)
    used = int((starts < sizes.context).sum())
    assert used == 60 and len(set(starts[:used].tolist())) == 3
    assert anchors[:used].equal(anchors[:used].sort().values) and bool(
        (starts[:used] <= anchors[:used]).all()
    )
    assert not anchors[used:].any()


@pytest.mark.usefixtures("stand_in")
def test_right_kernels_pass_the_gate() -> None:
    errors = flash_errors(small(), CPU, torch.float32, launches=2)
    assert len(errors) == len(NAMES) and max(errors) < 1e-4
    assert refusal(errors) is None


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("which", range(3))
def test_one_wrong_tile_of_one_gradient_in_one_launch_of_many_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    calls = []
    right = flash_stand_in.backward

    def sometimes_wrong(*args: Any, **more: Any) -> tuple[Tensor, ...]:
        found = right(*args, **more)
        calls.append(which)
        if len(calls) == 3:
            found[which][0, TILE : 2 * TILE] *= 1.1
        return found

    monkeypatch.setattr(flash_stand_in, "backward", sometimes_wrong)
    reason = refusal(flash_errors(small(), CPU, torch.float32, launches=4))
    assert reason is not None and NAMES[1 + which] in reason and f"{BOUND:.0%}" in reason


@pytest.mark.usefixtures("stand_in")
def test_what_is_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_stand_in.forward

    def broken(*args: Any, **more: Any) -> Any:
        out, lse, _ = right(*args, **more)
        out[0, 5, 0, 3] = torch.nan
        return out, lse, None

    monkeypatch.setattr(flash_stand_in, "forward", broken)
    errors = flash_errors(small(), CPU, torch.float32, launches=1)
    assert errors[0] == float("inf") and refusal(errors) is not None


def test_an_error_is_measured_by_the_worst_tile_of_a_head() -> None:
    wanted = torch.ones(2 * TILE, 3, 4)
    found = wanted.clone()
    found[TILE:, 1] = 1.5
    assert float(tile_error(found, wanted)) == pytest.approx(0.5)
    wanted[:TILE, 0] = 0  # where nothing is expected, a share of the mean counts
    found = wanted.clone()
    found[0, 0, 0] = 1e-6
    assert float(tile_error(found, wanted)) < 1e-4


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "words"),
    [
        ("cpu", torch.bfloat16, 128, "needs an NVIDIA GPU"),
        ("cuda:0", torch.bfloat16, 128, "sm80"),
        ("cuda:1", torch.float32, 128, "float32"),
        ("cuda:1", torch.bfloat16, 80, "80"),
        ("cuda:1", torch.bfloat16, 128, None),
    ],
)
def test_why_it_cannot_run_here(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, head_dim: int, words: str | None
) -> None:
    monkeypatch.setattr(flash_attention, "_installed", lambda: True)
    capability = {"cuda:0": (8, 0), "cuda:1": (9, 0)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability[str(device)])
    reason = flash_attention.unavailable(torch.device(device), dtype, head_dim)
    assert reason is None if words is None else reason is not None and words in reason


@pytest.mark.parametrize(("cute", "installed"), [(False, False), (True, True)])
def test_an_older_release_that_cannot_be_imported_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cute: bool, installed: bool
) -> None:
    """flash-attn 2 and 3 share the name, and break with every torch that they were not built for."""
    package = tmp_path / "flash_attn"
    (package / "cute" if cute else package).mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    reason = flash_attention.unavailable(torch.device("cuda:0"), torch.bfloat16, 128)
    assert reason == (None if installed else "the package flash-attn-4 is not installed")


def test_without_the_package_flex_attention_runs_unless_the_job_says_flash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    cuda = torch.device("cuda:0")
    kind, reason = choose_attention("auto", small(), cuda, torch.bfloat16)
    assert kind == FLEX and "flash-attn-4 is not installed" in reason
    with pytest.raises(JobError, match=r"attention = 'flash': the package flash-attn-4 is not installed"):
        choose_attention("flash", small(), cuda, torch.bfloat16)
    assert choose_attention("flex", small(), cuda, torch.bfloat16) == (FLEX, "the job says so")


@pytest.mark.parametrize("wanted", ["auto", "flash"])
def test_a_package_that_raises_or_is_wrong_is_one_reason(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setattr(attention_choice, "unavailable", lambda *_: None)
    results: list[Any] = [TypeError("got an unexpected keyword\nargument"), [0.0, 0.5, 0.0, 0.0]]
    for result, words in zip(results, ("unexpected keyword", "gradient of queries"), strict=True):

        def errors(*_: Any, result: Any = result) -> Any:
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(attention_choice, "flash_errors", errors)
        if wanted == "flash":
            with pytest.raises(JobError, match=words):
                choose_attention(wanted, small(), CPU, torch.bfloat16)
        else:
            kind, reason = choose_attention(wanted, small(), CPU, torch.bfloat16)
            assert kind == FLEX and words in reason and "\n" not in reason


def test_kernels_that_pass_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "unavailable", lambda *_: None)
    monkeypatch.setattr(attention_choice, "flash_errors", lambda *_: [0.001, 0.004, 0.003, 0.002])
    kind, reason = choose_attention("auto", small(), CPU, torch.bfloat16)
    assert kind == FLASH and "0.4%" in reason


def test_a_trial_is_the_same_every_time() -> None:
    one, other = (Trial(small(), CPU, torch.bfloat16) for _ in range(2))
    assert one.queries.equal(other.queries) and one.exact[2].equal(other.exact[2])
