"""scripts/bench_disk.py runs where there is no GPU, and prints all rates and the shares."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import bench_disk


def test_it_prints_the_rates_of_the_directory_and_of_the_engine_over_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"bench_disk.py --directory {tmp_path} --mib 32 --tensor-mib 1 --steps 1"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(bench_disk, "keep_freed_memory", lambda: None)  # of this process
    bench_disk.main()
    said = capsys.readouterr().out
    assert "32 MiB a step in tensors of 1, median of 1 turns" in said
    lines = said.splitlines()
    rates = {line[:42].strip(): line[42:].split() for line in lines[3:8] + lines[9:-1]}
    plain = [row.name for row in bench_disk.PLAIN]
    shares = [
        f"{row} / {calls}"
        for row in ("host and file", "device and file")
        for calls in ("one call in flight", "two calls in flight", "one buffer")
    ]
    assert [*rates] == [*plain, "host and file", "device and file", *shares]
    assert all(re.fullmatch(r"\d+\.\d{3}", number) for pair in rates.values() for number in pair)
    assert [*tmp_path.iterdir()] == []
