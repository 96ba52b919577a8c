"""How tools of this kind broke for the people who used them, and the test of panelflow for each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

# Project and number of public reports -> what happened, and the tests that show it does not happen here.
PREPARING: dict[str, tuple[str, list[str]]] = {
    "distributed 7970, 7353, 7870": (
        "losing one worker reruns everything",
        [
            "test_faults.py::test_workers_killed_in_the_middle_cost_only_what_was_under_way",
            "test_faults.py::test_a_killed_client_continues",
        ],
    ),
    "distributed 8088, 6981, 8411": (
        "a restart deadlocks when workers vanish",
        [
            "test_faults.py::test_workers_killed_in_the_middle_cost_only_what_was_under_way",
            "test_faults.py::test_a_cluster_that_loses_all_workers_ends_in_bounded_time",
        ],
    ),
    "distributed 8433, 8674; streaming 970": (
        "a full disk is fatal",
        [
            "test_interruptions.py::test_a_full_file_system_is_named_and_the_run_continues_after_space_is_made",
            "test_faults.py::test_a_full_disk_is_named_and_the_run_continues_after",
        ],
    ),
    "distributed 7380, 8015; qlib 690, 2097": (
        "killed for memory",
        [
            "test_memory.py::test_a_panel_ten_times_the_memory_of_the_cluster",
            "test_memory.py::test_awkward_sources_stay_within_the_budget",
        ],
    ),
    "distributed 8092, 7837": (
        "an all-null column in one partition breaks the schema",
        ["test_preparation.py::test_an_all_null_column_in_one_file_changes_nothing"],
    ),
    "distributed 8489; dask 11830; fastparquet 789": (
        "categories differ per file, codes overflow",
        [
            "test_preparation.py::test_same_bytes_from_categories_that_differ_per_file",
            "test_preparation.py::test_more_entities_than_sixteen_bits",
            "test_real_inputs.py::test_parquet_as_it_is_found",
        ],
    ),
    "distributed 8310; dask 10014": (
        "mixed objects fail opaquely in the middle",
        ["test_preparation.py::test_bad_input_is_refused_and_leaves_nothing"],
    ),
    "dask 10705, 12400": (
        "hashing by float64 joins keys",
        ["test_hashing.py::test_buckets_are_even_where_floats_would_collapse"],
    ),
    "dask 6864; distributed 8165, 2226": (
        "rows are lost at microsecond times or repeated index values",
        [
            "test_preparation.py::test_same_bytes_from_any_kind_of_date",
            "test_preparation.py::test_minute_bars_with_a_zone",
            "test_preparation.py::test_same_bytes_from_any_source",
        ],
    ),
    "dask 1850, 6640; petastorm PR247": (
        "a hash differs per process",
        [
            "test_preparation.py::test_same_bytes_in_another_process_with_another_hash_seed",
            "test_hashing.py::test_no_process_hashes_differently",
        ],
    ),
    "dask 12193": ("selecting columns changes the partitioning", ["test_preparation.py::test_fewer_features_keep_the_rows"]),
    "dask 5386": (
        "inference runs the writer on made-up rows",
        ["test_preparation.py::test_bad_input_is_refused_and_leaves_nothing"],
    ),
    "ray 29492": (
        "32-bit string offsets overflow",
        ["test_real_inputs.py::test_more_text_than_32_bits_of_offsets_in_chunks_is_read_by_distinct_value"],
    ),
    "zarr 3682; dask 12583; xarray 5286, 9072": (
        "two tasks write parts of one chunk",
        ["test_shards.py::test_a_misaligned_shard_is_refused", "test_preparation.py::test_every_shard_but_the_last_is_full"],
    ),
    "iohub 415, 442; zarrs-python 185": (
        "a torn shard blocks every retry",
        ["test_preparation.py::test_torn_and_altered_pieces_are_made_again"],
    ),
    "zarr 486": ("a missing shard reads as fill value", ["test_shards.py::test_damage_is_loud_and_names_file_and_rows"]),
    "zarr 3144, 1000": ("-0.0 and NaN payloads are lost", ["test_shards.py::test_every_bit_survives"]),
    "zarr 1435, 2719": (
        "overwrite races; a failed writer leaves a valid index",
        [
            "test_preparation.py::test_an_output_is_replaced_only_when_asked_and_only_by_a_whole_one",
            "test_interruptions.py::test_the_second_of_two_runs_into_one_output_is_refused",
            "test_s3.py::test_a_run_that_stopped_on_s3_goes_on",
        ],
    ),
    "arrow 47266; petastorm 652": (
        "repeated reads grow memory",
        ["test_real_inputs.py::test_fifty_passes_leave_memory_descriptors_and_threads_flat"],
    ),
    "investpy 180": ("the ticker NA becomes missing", ["test_preparation.py::test_odd_tickers_are_text"]),
    "etna 442, neural_prophet 578": ("two rows have one key", ["test_preparation.py::test_duplicates"]),
    "alphalens 108, 145; exchange_calendars 557": (
        "time zones or units are mixed",
        [
            "test_preparation.py::test_same_bytes_from_any_kind_of_date",
            "test_preparation.py::test_bad_input_is_refused_and_leaves_nothing",
        ],
    ),
    "qlib PR2147": ("one date that does not parse drops rows", ["test_preparation.py::test_csv_errors_name_the_line"]),
    "numpy 7930": (
        "float16 overflows, means in low precision",
        [
            "test_preparation.py::test_overflow_is_refused_beside_infinities",
            "test_statistics.py::test_equal_to_numpy_with_missing_values_and_a_large_mean",
        ],
    ),
    "mlfinlab 295; timeseriescv PR8; Vibe-Trading PR1204; numerai example-scripts 92": (
        "the purge is off by one, or by a span of rows",
        ["test_splits.py::test_purge_equals_brute_force_over_label_intervals", "test_splits.py::test_boundary_dates_by_hand"],
    ),
    "pytorch-forecasting 474, 584, 830, 605": (
        "a split without rows; an entity seen only in validation",
        [
            "test_preparation.py::test_a_split_that_loses_all_its_rows_is_refused",
            "test_preparation.py::test_an_entity_seen_only_in_evaluation",
        ],
    ),
    "greykite 102": ("time is not sorted", ["test_preparation.py::test_same_bytes_from_any_source"]),
    "pytorch-forecasting 751, 51": (
        "scalers are fitted on all rows",
        ["test_preparation.py::test_statistics_are_of_the_purged_training_rows"],
    ),
}


@pytest.mark.parametrize("report", PREPARING)
def test_each_hazard_has_its_tests(report: str) -> None:
    """The tests exist under the names that are given here, and assert something."""
    _, tests = PREPARING[report]
    assert tests
    for name in tests:
        file, _, function = name.partition("::")
        tree = ast.parse(Path(__file__).with_name(file).read_text())
        (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == function)
        assert any(isinstance(node, ast.Assert | ast.With) or "assert" in ast.dump(node) for node in ast.walk(found)), name
