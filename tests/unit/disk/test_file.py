"""The file below host memory: what is written is read back, nothing of it stays, and what it refuses."""

from __future__ import annotations

import errno
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.config import LEAST_DISK_BYTES as FIRST_BYTES
from offload.config import OffloadConfig
from offload.disk.file import GROWTH_BYTES, Extents, SpillFile

PAGE = 4096


def on_pages(nbytes: int, offset: int = 0) -> torch.Tensor:
    """Bytes of memory that start `offset` behind a page."""
    memory = torch.frombuffer(mmap.mmap(-1, nbytes + offset), dtype=torch.uint8)
    return memory[offset:]


@pytest.fixture(params=[True, False], ids=["O_DIRECT", "page cache"])
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SpillFile:
    if not request.param:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    found = SpillFile(str(tmp_path))
    if request.param and not found.direct:
        pytest.skip("the file system of the temporary folder has no O_DIRECT")
    if not request.param:
        found.direct = False
    return found


@pytest.mark.parametrize(
    "sizes",
    [[(PAGE,)], [(2 * PAGE, 100)], [(1,)], [(5000,), (PAGE, 7), (3 * PAGE,)], [(PAGE,) * 600]],
    ids=str,
)
@pytest.mark.parametrize("offset", [0, 512, 3])
def test_what_is_written_is_read_back_byte_for_byte(
    file: SpillFile, sizes: list[tuple[int, ...]], offset: int
) -> None:
    """Tensors of one part or several, that end inside a page or at its end, in memory on pages or not."""
    generator = torch.Generator().manual_seed(0)
    tensors = [[on_pages(nbytes, offset) for nbytes in parts] for parts in sizes]
    for part in (part for tensor in tensors for part in tensor):
        part.copy_(torch.randint(256, (part.numel(),), dtype=torch.uint8, generator=generator))
    file.write(tensors, 2 * PAGE)
    found = [[on_pages(nbytes, offset) for nbytes in parts] for parts in sizes]
    file.read(found, 2 * PAGE)
    for written, read in zip(tensors, found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(written, read, strict=True))


def test_each_tensor_has_pages_of_its_own(file: SpillFile) -> None:
    first, second = on_pages(10).fill_(1), on_pages(10).fill_(2)
    file.write([[first], [second]], 0)
    found = on_pages(10)
    file.read([[found]], PAGE)
    assert torch.equal(found, second)


def test_the_directory_is_empty_while_the_file_is_in_use(file: SpillFile, tmp_path: Path) -> None:
    """So a kill leaves nothing: the system frees a file without a name with its last user."""
    file.write([[on_pages(PAGE)]], 0)
    assert [*tmp_path.iterdir()] == []


def test_a_closed_file_gives_its_bytes_back(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    number = file._number
    assert os.fstat(number).st_size == FIRST_BYTES
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


# -- refusals ------------------------------------------------------------------------------------------------
def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk_directory '.*/none' is no directory; make it, or give one"):
        SpillFile(str(tmp_path / "none"))


def test_a_directory_that_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        ValueError, match=r"disk_directory '.*' \(.* at /.*\) cannot be used: Permission denied"
    ):
        SpillFile(str(tmp_path))


def test_a_directory_without_space_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"cannot hold 16,777,216 bytes: No space left for 16,777,216 bytes, 5 are free of disk_lim",
    ):
        SpillFile(str(tmp_path), limit_bytes=5)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("refused_at", ["open", "the first write"])
def test_where_o_direct_is_refused_the_page_cache_is_used_and_said_once(
    refused_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened, written = os.open, os.pwritev

    def open_(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and refused_at == "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, mode)

    calls = [0]

    def pwritev(*arguments: Any) -> int:
        calls[0] += 1
        if calls[0] == 1 and refused_at != "open":
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return written(*arguments)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "pwritev", pwritev)
    with caplog.at_level(logging.INFO):
        file = SpillFile(str(tmp_path))
    assert not file.direct
    (said,) = [record.getMessage() for record in caplog.records]
    assert "refuses O_DIRECT; the file is written and read through the page cache" in said
    tensor = on_pages(5000).fill_(3)
    file.write([[tensor]], 0)
    file.read([[found := on_pages(5000)]], 0)
    assert torch.equal(found, tensor)


def test_a_call_that_moves_fewer_bytes_is_continued(file: SpillFile, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda number, views, at: write(number, [views[0][:PAGE]], at))
    monkeypatch.setattr(os, "preadv", lambda number, views, at: read(number, [views[0][:PAGE]], at))
    tensor = torch.arange(3 * PAGE, dtype=torch.int32).view(torch.uint8)
    memory = on_pages(tensor.numel())
    memory.copy_(tensor)
    file.write([[memory]], 0)
    file.read([[found := on_pages(tensor.numel())]], 0)
    assert torch.equal(found, tensor)


def test_a_short_write_that_cannot_be_continued_is_an_error(
    file: SpillFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda number, views, at: 0 if at else PAGE)
    with pytest.raises(OSError, match="the file ends at byte 4,096"):
        file.write([[on_pages(2 * PAGE)]], 0)


# -- extents -------------------------------------------------------------------------------------------------
def test_extents_lie_side_by_side_and_are_used_again(tmp_path: Path) -> None:
    file = SpillFile(str(tmp_path))
    extents = Extents(file)
    first, second = extents.take([PAGE + 1, 10])
    assert (first.start, first.end, second.start, second.end) == (0, 2 * PAGE, 2 * PAGE, 3 * PAGE)
    assert extents.lent_bytes == 3 * PAGE
    extents.give_back(first)
    (third,) = extents.take([2 * PAGE])
    assert third.start == 0
    assert (extents.take_peak(), extents.lent_bytes) == (3 * PAGE, 3 * PAGE)
    assert file.nbytes == FIRST_BYTES


def test_the_file_grows_by_large_steps_and_by_the_last_bytes_up_to_its_limit(tmp_path: Path) -> None:
    limit = FIRST_BYTES + GROWTH_BYTES + 2 * PAGE
    file = SpillFile(str(tmp_path), limit_bytes=limit)
    extents = Extents(file)
    extents.take([FIRST_BYTES])
    extents.take([PAGE])
    assert file.nbytes == FIRST_BYTES + GROWTH_BYTES
    extents.take([GROWTH_BYTES - PAGE])
    extents.take([2 * PAGE])
    assert file.nbytes == limit
    with pytest.raises(OSError, match="No space left for 4,096 bytes, 0 are free"):
        extents.take([1])
    assert extents.lent_bytes == limit


def test_without_a_limit_a_twentieth_of_the_file_system_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SpillFile(str(tmp_path))

    class Space:
        f_frsize, f_blocks, f_bavail = 4096, 2000, 101

    monkeypatch.setattr(os, "fstatvfs", lambda number: Space)
    file.grow(4096)
    with pytest.raises(OSError, match="No space left for 8,192 bytes, 4,096 are free"):
        file.grow(8192)


def test_giving_back_does_not_wait_for_a_growth_of_the_file(tmp_path: Path) -> None:
    extents = Extents(SpillFile(str(tmp_path)))
    (extent,) = extents.take([PAGE])
    with extents._lock:  # as `take` holds it while the file grows
        extents.give_back(extent)
    assert extents.lent_bytes == 0


@pytest.mark.parametrize("limit", [0, 4096, (16 << 20) - 1, "8MB"])
def test_a_limit_below_what_the_file_begins_with_is_no_full_file_system(limit: int, tmp_path: Path) -> None:
    """It was reported as "cannot hold 16,777,216 bytes: No space left": free some space there."""
    with pytest.raises(ValueError, match=f"disk_limit_bytes is {limit!r}, must be .* 16,777,216 or more"):
        OffloadConfig(disk_directory=str(tmp_path), disk_limit_bytes=limit)
    assert OffloadConfig(disk_directory=str(tmp_path), disk_limit_bytes="16MiB").disk_limit_bytes == 16 << 20
