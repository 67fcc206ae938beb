"""`timing`: what is timed, and how often."""

from __future__ import annotations

import functools

import pytest
import torch

from pomona.sparse import timing


def test_plain_calls_are_counted_with_their_warmup() -> None:
    counts = [0, 0]

    def count_call(which: int) -> None:
        counts[which] += 1

    calls = [functools.partial(count_call, which) for which in range(2)]
    times = timing.median_seconds(calls, torch.device("cpu"), repeats=6, include_host=True)
    assert len(times) == 2
    assert counts[0] == counts[1] == (timing.WARMUP_TURNS + 6) * (timing.WARMUP_CALLS + 1)


@pytest.mark.gpu
def test_on_a_gpu_several_calls_in_a_row_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of calls depends on the time of one, so that the limit is set far from what a busy device takes."""
    x = torch.zeros(3, device="cuda")
    for limit, expected in ((60.0, 5), (0.0, 1)):
        monkeypatch.setattr(timing, "WARMUP_SECONDS", limit)
        replay, calls = timing.capture_calls(lambda: x.add_(1), 5)
        before = x[0].item()
        replay()
        assert calls == expected
        assert x.tolist() == [before + expected] * 3
    monkeypatch.undo()
    cold, warm = (
        timing.median_seconds([lambda: x.add_(1)], x.device, before=b, repeats=5)[0] for b in (lambda: None, None)
    )
    assert 0 < warm < 1
    assert 0 < cold < 1


def test_the_largest_cache_that_linux_reports_is_read(tmp_path) -> None:
    for index, size in enumerate(["32K", "1024K", "33M", "?"]):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert timing.read_cpu_cache_bytes(tmp_path) == 33 << 20
    assert timing.read_cpu_cache_bytes(tmp_path / "none") == 0


def test_the_last_level_cache_has_a_size() -> None:
    assert timing.last_cache_bytes(torch.device("cpu")) >= 1 << 18
