"""The rank table: what it says, and that ranks which differ cannot hang one another (real gloo ranks)."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from offload.telemetry.summary import format_offload_summary_table, print_offload_summary_table
from tests.once import made_once
from tests.ranks import run_ranks

MB = 10**6


def cells(table: str) -> list[list[str]]:
    """The rows under the rule, split at runs of spaces; "Rank 0" is one cell."""
    return [line.replace("Rank ", "Rank_").split() for line in table.splitlines()[3:]]


@pytest.mark.req("S2-4")
def test_table_has_a_row_a_rank_a_column_a_group_and_totals_both_ways() -> None:
    table = format_offload_summary_table(
        {0: {"core_attn": 3 * MB, "mlp_act": MB // 2}, 1: {"core_attn": MB, "mlp_act": MB // 4}}
    )
    assert table.splitlines()[0] == "Activation Offload Summary (MB)"
    assert table.splitlines()[1].split() == ["core_attn", "mlp_act", "Total"]
    assert cells(table) == [
        ["Rank_0", "3.00", "0.50", "3.50"],
        ["Rank_1", "1.00", "0.25", "1.25"],
        ["Total", "4.00", "0.75", "4.75"],
    ]


@pytest.mark.req("S2-5")
def test_columns_are_the_sorted_union_and_a_group_that_a_rank_lacks_is_zero() -> None:
    table = format_offload_summary_table({1: {"attn_norm": MB}, 0: {"qkv_linear": 2 * MB}})
    assert table.splitlines()[1].split() == ["attn_norm", "qkv_linear", "Total"]
    assert cells(table)[:2] == [["Rank_0", "0.00", "2.00", "2.00"], ["Rank_1", "1.00", "0.00", "1.00"]]


@pytest.mark.req("S2-4")
def test_totals_sum_bytes_and_round_once() -> None:
    nbytes = MB // 300  # 0.0033 MB: each cell rounds to 0.00, the sum of three does not
    table = format_offload_summary_table({rank: {"mlp_act": nbytes} for rank in range(3)})
    assert cells(table)[0][1:] == ["0.00", "0.00"]
    assert cells(table)[-1][1:] == ["0.01", "0.01"]


@pytest.mark.req("S2-4")
def test_a_group_whose_name_reads_as_a_number_keeps_its_name() -> None:
    assert format_offload_summary_table({0: {"1e3": MB}}).splitlines()[1].split() == ["1e3", "Total"]


@pytest.mark.req("S2-6")
def test_without_a_process_group_one_rank_is_shown() -> None:
    out = io.StringIO()
    print_offload_summary_table({"core_attn": 3 * MB}, file=out)
    assert cells(out.getvalue()) == [["Rank_0", "3.00", "3.00"], ["Total", "3.00", "3.00"]]


@pytest.mark.req("S2-3")
def test_default_output_is_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    print_offload_summary_table({"core_attn": MB})
    assert "Activation Offload Summary (MB)" in capsys.readouterr().out


@pytest.mark.req("S2-6")
@pytest.mark.parametrize("offloaded", [{}, {"core_attn": 0, "mlp_act": 0}])
def test_nothing_offloaded_prints_nothing(offloaded: dict[str, int]) -> None:
    out = io.StringIO()
    print_offload_summary_table(offloaded, file=out)
    assert out.getvalue() == ""


def test_negative_bytes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"group 'core_attn' reports -5 bytes offloaded, the least is 0"):
        print_offload_summary_table({"core_attn": -5})


class SlowFile(io.StringIO):
    """Leaves a mark once the table is out, a while after it was asked to write it."""

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self._mark = mark

    def write(self, text: str) -> int:
        time.sleep(0.5)
        return super().write(text)

    def flush(self) -> None:
        self._mark.touch()


def summarise_on_one_rank(rank: int, world_size: int, folder: str) -> None:
    """Three tables in one job: ranks with unlike names, ranks with nothing, and the last rank alone. Each
    rank's output goes to files."""
    last_rank_alone = dist.new_group([world_size - 1])
    unlike: dict[str, int] = (
        {"core_attn": 2 * MB, "mlp_act": MB} if rank == 0 else {"a_name_that_only_this_rank_has" * 20: MB}
    )
    for title, nbytes, group in [
        ("unlike", unlike, None),
        ("nothing", {}, None),
        ("alone", {"moe_act": MB}, last_rank_alone),
    ]:
        table_is_out = Path(folder, f"{title}_is_out")
        out = SlowFile(table_is_out)
        print_offload_summary_table(nbytes, process_group=group, file=out)
        Path(folder, f"{title}{rank}_returned").write_text("after" if table_is_out.exists() else "before")
        Path(folder, f"{title}{rank}").write_text(out.getvalue())


@pytest.fixture(scope="module")
def outputs_of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each of two gloo ranks wrote, by title and rank: "unlike0", "unlike1", "nothing0", ..."""

    def said(folder: Path) -> dict[str, str]:
        (folder / "said").mkdir()
        run_ranks(summarise_on_one_rank, 2, folder, str(folder / "said"))
        return {path.name: path.read_text() for path in (folder / "said").iterdir()}

    return made_once(tmp_path_factory, "summary", said)


@pytest.mark.req("S2-3", "S2-5", "S2-7")
def test_ranks_with_different_groups_make_one_table_on_the_first_rank(
    outputs_of_two_ranks: dict[str, str],
) -> None:
    table = outputs_of_two_ranks["unlike0"]
    assert table.splitlines()[1].split() == [
        "a_name_that_only_this_rank_has" * 20,
        "core_attn",
        "mlp_act",
        "Total",
    ]
    assert cells(table) == [
        ["Rank_0", "0.00", "2.00", "1.00", "3.00"],
        ["Rank_1", "1.00", "0.00", "0.00", "1.00"],
        ["Total", "1.00", "2.00", "1.00", "4.00"],
    ]
    assert outputs_of_two_ranks["unlike1"] == ""


@pytest.mark.req("S2-7")
def test_no_rank_returns_before_the_table_is_out(outputs_of_two_ranks: dict[str, str]) -> None:
    assert (outputs_of_two_ranks["unlike0_returned"], outputs_of_two_ranks["unlike1_returned"]) == (
        "after",
        "after",
    )


@pytest.mark.req("S2-6")
def test_ranks_that_offload_nothing_print_nothing(outputs_of_two_ranks: dict[str, str]) -> None:
    assert outputs_of_two_ranks["nothing0"] == outputs_of_two_ranks["nothing1"] == ""


@pytest.mark.req("S2-7")
def test_a_process_group_of_its_own_makes_a_table_of_its_own(outputs_of_two_ranks: dict[str, str]) -> None:
    assert outputs_of_two_ranks["alone0"] == ""  # not a member: returned at once
    assert cells(outputs_of_two_ranks["alone1"]) == [["Rank_1", "1.00", "1.00"], ["Total", "1.00", "1.00"]]
