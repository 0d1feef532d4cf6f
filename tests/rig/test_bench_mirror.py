"""The mirror's bench, alive and small: that it measures, not what."""

import pytest

from bench.mirror import measure, table
from tests.rig.rig import Rig

KEYS = {
    "latency_ms_p50", "latency_ms_p95", "tail_latency_ms_p50", "tail_latency_ms_p95", "mib_s", "cat_mib_s",
    "pull_mib_s", "container_core_pct", "laptop_core_pct", "container_busy_core_pct",
    "laptop_busy_core_pct",
}  # fmt: skip


def test_the_bench_of_the_mirror_measures_all_that_it_promises(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    for name, value in rig.laptop_env().items():
        monkeypatch.setenv(name, value)
    found = measure(rig, lines=10, mib=16, idle_s=1.0)
    assert set(found) == KEYS
    assert 0 < found["latency_ms_p50"] <= found["latency_ms_p95"]
    assert found["tail_latency_ms_p50"] > 0
    assert 0 < found["container_core_pct"] < 20
    assert 0 < found["laptop_core_pct"] < 50
    assert "latency p50" in table(found)
