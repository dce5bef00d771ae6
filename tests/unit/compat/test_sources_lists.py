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

ROUND_TRIP = "unit/compat/test_manual_copies.py::test_one_tensor_comes_back_with_its_bits_and_its_strides"
CHECKED = "unit/groups/test_chunk.py::test_small_marked_and_parameter_tensors_need_no_offloading"
SUB_POOL = "unit/compat/test_tensor_pool.py::test_a_sub_pool_serves_one_shape_and_dtype"
FOREIGN = "unit/compat/test_tensor_pool.py::test_a_foreign_tensor_is_refused"
MADE = "unit/compat/test_tensor_pool.py::test_a_pool_makes_its_tensors_where_and_as_it_was_told"
ANY_LENT = "unit/compat/test_tensor_pool.py::test_any_shape_and_dtype_can_be_lent"
CYCLES = "gpu/test_pool.py::test_twenty_cycles_are_one_miss_and_five_are_right_each_time"
POPPED = "unit/compat/test_group.py::test_pop_removes_the_very_tensor_that_was_pushed_under_its_tag"
WHICH_POOL = "unit/compat/test_group.py::test_groups_of_dynamic_shapes_stay_out_of_the_shape_keyed_pool"
SWITCH = "unit/groups/test_manager.py::test_switch_reaches_every_cached_chunk"
MARKED = "unit/groups/test_manager.py::test_marked_tensor_never_leaves_nor_do_its_views"
MODEL_LEVEL = "unit/groups/test_interface.py::test_model_level_use"
FRACTIONS = "unit/optim/test_hybrid.py::test_fraction_0_has_no_cpu_optimizer_and_fraction_1_no_gpu_optimizer"
PLACES = "unit/optim/test_hybrid.py::test_every_place_gives_the_bits_of_torchs_fused_adamw"
OVERLAP = "unit/optim/test_hybrid.py::test_overlap_on_and_off_are_equal_bit_for_bit_over_ten_steps"
DEBUGGING = (
    "unit/groups/test_fine_grained_page.py::test_debug_rank_prints_only_when_debugging_and_only_on_its_rank"
)
CAPTURING = "unit/groups/test_marks.py::test_nothing_is_captured_without_cuda"

LISTS: dict[str, dict[str, str]] = {
    "tensor pool": {
        "allocate_returns_correct_shape_and_dtype": ANY_LENT,
        "allocate_multiple_dtypes": ANY_LENT,
        "free_returns_tensor_to_pool": "unit/compat/test_tensor_pool.py::test_status_counts_one_pool_or_all",
        "pool_reuse_after_free": "unit/compat/test_tensor_pool.py::test_a_freed_tensor_is_reused",
        "pool_miss_when_different_shape": SUB_POOL,
        "pool_miss_when_different_dtype": SUB_POOL,
        "free_unknown_tensor_raises": FOREIGN,
        "free_wrong_pool_tensor_raises": FOREIGN,
        "reset_makes_all_available": (
            "unit/compat/test_tensor_pool.py::test_reset_makes_every_tensor_available"
        ),
        "clear_releases_everything": (
            "unit/compat/test_tensor_pool.py::test_clear_releases_everything_and_the_next_allocate_is_a_miss"
        ),
        "many_allocations_and_frees": (
            "unit/compat/test_tensor_pool.py::test_the_cost_of_allocate_and_free_does_not_grow_with_the_pool"
        ),
        "pinned_memory_allocation": MADE,
        "pinned_pool_reuse_stays_pinned": CYCLES,
    },
    "offload group": {
        "init_defaults": "unit/compat/test_group.py::test_group_leaves_unless_the_plan_keeps_it",
        "init_no_pool": WHICH_POOL,
        "push_pop_tensor": POPPED,
        "push_pop_multiple": POPPED,
        "push_overwrites": (
            "unit/compat/test_group.py::test_tag_that_is_taken_is_refused_and_keeps_its_tensor"
        ),
        "update_offload_info": "unit/compat/test_group.py::test_sizes_add_up_tensor_by_tensor",
        "record_and_wait_offload_event": (
            "unit/compat/test_group.py"
            "::test_lane_that_waits_for_the_offload_event_may_read_what_was_copied_out"
        ),
        "record_and_wait_reload_event": (
            "unit/compat/test_group.py"
            "::test_lane_that_waits_for_the_reload_event_may_read_what_was_copied_back"
        ),
    },
    "chunk handler": {
        "offload_returns_correct_state": ROUND_TRIP,
        "offload_preserves_data": ROUND_TRIP,
        "offload_non_contiguous_tensor": ROUND_TRIP,
        "offload_without_pool": (
            "unit/compat/test_manual_copies.py::test_without_the_pool_a_tensor_gets_host_memory_of_its_own"
        ),
        "reload_restores_to_gpu": ROUND_TRIP,
        "offload_reload_roundtrip_exact": ROUND_TRIP,
        "offload_reload_various_sizes": ROUND_TRIP,
        "large_tensor_offloaded": CHECKED,
        "small_tensor_skipped": CHECKED,
        "marked_not_offloadable": CHECKED,
        "no_attribute_defaults_to_offload": CHECKED,
        "bulk_offload_and_reload_group": (
            "unit/groups/test_chunk.py::test_pop_fetches_a_tensor_that_has_left_whether_its_copy_has_run_or_not"
        ),
        "bulk_offload_skips_small_tensors": (
            "unit/groups/test_out_and_back.py::test_group_leaves_under_one_event_and_small_tensors_stay"
        ),
    },
    "manager": {
        "get_instance_returns_same_object": (
            "unit/groups/test_manager.py::test_instance_is_made_on_first_use_and_is_the_same_afterwards"
        ),
        "reset_instance_creates_new": (
            "unit/groups/test_manager.py::test_reset_instance_makes_a_new_one_and_really_frees_the_old"
        ),
        "has_dedicated_streams": (
            "unit/groups/test_manager.py::test_copy_streams_differ_from_each_other_and_from_compute"
        ),
        "init_chunk_handler_creates_chunk": MODEL_LEVEL,
        "init_multiple_chunks": "unit/groups/test_manager.py::test_streams_handlers_and_groups_are_made_once",
        "init_with_vpp": (
            "unit/groups/test_scenarios.py::test_gradients_of_every_schedule_over_several_iterations"
        ),
        "disable_sets_flag": SWITCH,
        "enable_restores_flag": SWITCH,
        "marks_tensor": MARKED,
        "none_tensor_no_error": MARKED,
        "enter_exit_without_chunk": (
            "unit/groups/test_open_scopes.py"
            "::test_context_installs_hooks_only_for_a_current_chunk_while_offloading_is_on"
        ),
        "push_and_flush": (
            "unit/groups/test_manager.py::test_delayed_groups_are_flushed_once_in_the_order_of_their_commits"
        ),
    },
    "hybrid optimizer": {
        "create_with_defaults": (
            "unit/optim/test_hybrid.py"
            "::test_the_first_parameters_leave_and_sub_optimizers_are_the_cpus_then_the_gpus"
        ),
        "zero_offload_fraction": FRACTIONS,
        "full_offload_fraction": FRACTIONS,
        "step_runs_without_error": "unit/optim/test_hybrid.py::test_adam_and_sgd_match_the_reference",
        "parameters_update": "unit/optim/test_hybrid.py::test_adam_and_sgd_match_the_reference",
        "zero_offload_matches_pure_gpu": PLACES,
        "overlap_flag": OVERLAP,
        "overlap_and_non_overlap_produce_similar_results": OVERLAP,
        "param_update_in_fp32": (
            "unit/optim/test_hybrid.py::test_masters_in_fp32_are_stepped_and_the_weights_are_their_rounding"
        ),
        "zero_grad": (
            "unit/optim/test_hybrid.py::test_zero_grad_works_both_ways_and_clears_decoupled_gradients"
        ),
        "dummy_step_initializes_state": (
            "unit/optim/test_hybrid.py::test_a_dummy_step_fills_the_state_and_changes_no_weight"
        ),
    },
    "utils": {
        "debug_disabled_no_output": DEBUGGING,
        "debug_enabled_prints": DEBUGGING,
        "returns_bool": CAPTURING,
        "not_capturing_normally": CAPTURING,
        "local_summary": (
            "unit/telemetry/test_summary.py"
            "::test_table_has_a_row_a_rank_a_column_a_group_and_totals_both_ways"
        ),
        "empty_summary": "unit/telemetry/test_summary.py::test_nothing_offloaded_prints_nothing",
    },
}
COUNTS = {
    "tensor pool": 13,
    "offload group": 8,
    "chunk handler": 13,
    "manager": 12,
    "hybrid optimizer": 11,
    "utils": 6,
}
"""As the requirement has them."""


@pytest.mark.req("S3-63")
@pytest.mark.parametrize("name", LISTS)
def test_each_of_the_sources_tests_has_one_here(name: str) -> None:
    assert len(LISTS[name]) == COUNTS[name]
    for ours in LISTS[name].values():
        path, _, test = ours.partition("::")
        tree = ast.parse((TESTS / path).read_text())
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == test]
        assert len(found) == 1, ours
