"""torchtitan pull request 63's own unit tests, list by list: each of its tests by name, and the one here that
holds the same and more.

Two of its tests state what holds otherwise here: a tag that is taken is refused, not overwritten, and delayed
groups are flushed in the order of their commits, not in reverse. Its end-to-end list is test_end_to_end.py.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]

HOLDS: dict[str, dict[str, str]] = {
    "unit/compat/test_tensor_pool.py": {
        "any_shape_and_dtype_can_be_lent": (
            "allocate_returns_correct_shape_and_dtype allocate_multiple_dtypes"
        ),
        "status_counts_one_pool_or_all": "free_returns_tensor_to_pool",
        "a_freed_tensor_is_reused": "pool_reuse_after_free",
        "a_sub_pool_serves_one_shape_and_dtype": (
            "pool_miss_when_different_shape pool_miss_when_different_dtype"
        ),
        "a_foreign_tensor_is_refused": "free_unknown_tensor_raises free_wrong_pool_tensor_raises",
        "reset_makes_every_tensor_available": "reset_makes_all_available",
        "clear_releases_everything_and_the_next_allocate_is_a_miss": "clear_releases_everything",
        "the_cost_of_allocate_and_free_does_not_grow_with_the_pool": "many_allocations_and_frees",
        "a_pool_makes_its_tensors_where_and_as_it_was_told": "pinned_memory_allocation",
    },
    "gpu/test_pool.py": {
        "twenty_cycles_are_one_miss_and_five_are_right_each_time": "pinned_pool_reuse_stays_pinned"
    },
    "unit/compat/test_group.py": {
        "group_leaves_unless_the_plan_keeps_it": "init_defaults",
        "groups_of_dynamic_shapes_stay_out_of_the_shape_keyed_pool": "init_no_pool",
        "pop_removes_the_very_tensor_that_was_pushed_under_its_tag": "push_pop_tensor push_pop_multiple",
        "tag_that_is_taken_is_refused_and_keeps_its_tensor": "push_overwrites",
        "sizes_add_up_tensor_by_tensor": "update_offload_info",
        "lane_that_waits_for_the_offload_event_may_read_what_was_copied_out": "record_and_wait_offload_event",
        "lane_that_waits_for_the_reload_event_may_read_what_was_copied_back": "record_and_wait_reload_event",
    },
    "unit/compat/test_manual_copies.py": {
        "one_tensor_comes_back_with_its_bits_and_its_strides": (
            "offload_returns_correct_state offload_preserves_data offload_non_contiguous_tensor"
            " reload_restores_to_gpu offload_reload_roundtrip_exact offload_reload_various_sizes"
        ),
        "without_the_pool_a_tensor_gets_host_memory_of_its_own": "offload_without_pool",
    },
    "unit/groups/test_chunk.py": {
        "small_marked_and_parameter_tensors_need_no_offloading": (
            "large_tensor_offloaded small_tensor_skipped marked_not_offloadable"
            " no_attribute_defaults_to_offload"
        ),
        "pop_fetches_a_tensor_that_has_left_whether_its_copy_has_run_or_not": "bulk_offload_and_reload_group",
    },
    "unit/groups/test_out_and_back.py": {
        "group_leaves_under_one_event_and_small_tensors_stay": "bulk_offload_skips_small_tensors"
    },
    "unit/groups/test_manager.py": {
        "instance_is_made_on_first_use_and_is_the_same_afterwards": "get_instance_returns_same_object",
        "reset_instance_makes_a_new_one_and_really_frees_the_old": "reset_instance_creates_new",
        "copy_streams_differ_from_each_other_and_from_compute": "has_dedicated_streams",
        "streams_handlers_and_groups_are_made_once": "init_multiple_chunks",
        "switch_reaches_every_cached_chunk": "disable_sets_flag enable_restores_flag",
        "marked_tensor_never_leaves_nor_do_its_views": "marks_tensor none_tensor_no_error",
        "delayed_groups_are_flushed_once_in_the_order_of_their_commits": "push_and_flush",
    },
    "unit/groups/test_interface.py": {"model_level_use": "init_chunk_handler_creates_chunk"},
    "unit/groups/test_scenarios.py": {"gradients_of_every_schedule_over_several_iterations": "init_with_vpp"},
    "unit/groups/test_scopes.py": {
        "context_installs_hooks_only_for_a_current_chunk_while_offloading_is_on": "enter_exit_without_chunk"
    },
    "unit/optim/test_hybrid.py": {
        "the_first_parameters_leave_and_sub_optimizers_are_the_cpus_then_the_gpus": "create_with_defaults",
        "fraction_0_has_no_cpu_optimizer_and_fraction_1_no_gpu_optimizer": (
            "zero_offload_fraction full_offload_fraction"
        ),
        "adam_and_sgd_match_the_reference": "step_runs_without_error parameters_update",
        "every_place_gives_the_bits_of_torchs_fused_adamw": "zero_offload_matches_pure_gpu",
        "overlap_on_and_off_are_equal_bit_for_bit_over_ten_steps": (
            "overlap_flag overlap_and_non_overlap_produce_similar_results"
        ),
        "masters_in_fp32_are_stepped_and_the_weights_are_their_rounding": "param_update_in_fp32",
        "zero_grad_works_both_ways_and_clears_decoupled_gradients": "zero_grad",
        "a_dummy_step_fills_the_state_and_changes_no_weight": "dummy_step_initializes_state",
    },
    "unit/groups/test_fine_grained_page.py": {
        "debug_rank_prints_only_when_debugging_and_only_on_its_rank": (
            "debug_disabled_no_output debug_enabled_prints"
        )
    },
    "unit/groups/test_marks.py": {"nothing_is_captured_without_cuda": "returns_bool not_capturing_normally"},
    "unit/telemetry/test_summary.py": {
        "table_has_a_row_a_rank_a_column_a_group_and_totals_both_ways": "local_summary",
        "nothing_offloaded_prints_nothing": "empty_summary",
    },
}
"""By file and test of ours, those of the source's that it holds."""
LISTS = {
    "tensor pool": (13, ["unit/compat/test_tensor_pool.py", "gpu/test_pool.py"]),
    "offload group": (8, ["unit/compat/test_group.py"]),
    "chunk handler": (
        13,
        [
            "unit/compat/test_manual_copies.py",
            "unit/groups/test_chunk.py",
            "unit/groups/test_out_and_back.py",
        ],
    ),
    "manager": (
        12,
        [
            "unit/groups/test_manager.py",
            "unit/groups/test_interface.py",
            "unit/groups/test_scenarios.py",
            "unit/groups/test_scopes.py",
        ],
    ),
    "hybrid optimizer": (11, ["unit/optim/test_hybrid.py"]),
    "utils": (
        6,
        [
            "unit/groups/test_fine_grained_page.py",
            "unit/groups/test_marks.py",
            "unit/telemetry/test_summary.py",
        ],
    ),
}
"""The count that the requirement has, and the files of ours."""


@pytest.mark.req("S3-63")
@pytest.mark.parametrize("name", LISTS)
def test_each_of_the_sources_tests_has_one_here(name: str) -> None:
    count, paths = LISTS[name]
    assert sum(len(its.split()) for path in paths for its in HOLDS[path].values()) == count
    for path in paths:
        tree = ast.parse((TESTS / path).read_text())
        found = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert {f"test_{ours}" for ours in HOLDS[path]} <= found
