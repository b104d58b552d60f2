"""Every function of the contract that stores to shared memory is killed at each instruction."""

from __future__ import annotations

import re

from conventions.sources import public_functions
from support.processes import ROOT

#: These read, or store only to memory of the process's own.
STORES_NOTHING = {
    "shmq_queue_settings",
    "shmq_topic_settings",
    "shmq_broker_client",
    "shmq_broker_close",
    "shmq_broker_forked",
    "shmq_broker_map",
    "shmq_broker_missing",
    "shmq_broker_unmap",
    "shmq_constants",
    "shmq_dead_topic",
    "shmq_dead_waiting",
    "shmq_consumer_free",
    "shmq_consumer_get_info",
    "shmq_directory_bytes",
    "shmq_directory_generation",
    "shmq_fork_generation",
    "shmq_lanes_free",
    "shmq_layout",
    "shmq_layout_fingerprint",
    "shmq_layout_size",
    "shmq_layout_version",
    "shmq_lease_copy",
    "shmq_lease_measure",
    "shmq_lease_open",
    "shmq_lease_properties",
    "shmq_loan_data",
    "shmq_loan_free",
    "shmq_broker_stopped",
    "shmq_loan_truncate",
    "shmq_message_is_ours",
    "shmq_producer_lacks",
    "shmq_name_ephemeral",
    "shmq_name_valid",
    "shmq_now",
    "shmq_producer_close",
    "shmq_producer_open",
    "shmq_producer_seal",
    "shmq_properties_check",
    "shmq_property_add",
    "shmq_property_next",
    "shmq_queue_bytes",
    "shmq_queue_find",
    "shmq_realtime",
    "shmq_record_split",
    "shmq_records_decode",
    "shmq_records_properties",
    "shmq_records_leasable",
    "shmq_records_scan",
    "shmq_segment_has_pages",
    "shmq_segment_release",
    "shmq_segment_view",
    "shmq_slot_record",
    "shmq_status_name",
    "shmq_status_sentence",
    "shmq_store_close",
    "shmq_store_find",
    "shmq_store_get_info",
    "shmq_store_limits_check",
    "shmq_store_open",
    "shmq_store_stripe",
    "shmq_topic_find",
    "shmq_waiter_free",
    "shmq_error_detail",
    "shmq_waiter_catch",
    "shmq_waiter_caught",
    "shmq_window_add",
    "shmq_window_find",
    "shmq_window_free",
    "shmq_window_open",
    "shmq_window_remove",
    "shmq_window_reserve",
    "shmq_wire_bodies",
    "shmq_wire_finishes",
    "shmq_wire_frame",
    "shmq_wire_id",
    "shmq_wire_publishes",
    "shmq_wire_batch",
}

#: Other names, or other ends, of functions that are killed.
KILLED_ELSEWHERE = {
    "shmq_audit": "looks, and what it may do then is shmq_rebuild",
    "shmq_disk_trouble": "reads one word, and asks as shmq_supervisor_alive does",
    "shmq_killpoint_arm": "the tests' own",
    "shmq_reap_wait": "looks as shmq_reap_scan does",
    "shmq_request_wait": "waits as shmq_consumer_wait does, and asks as shmq_supervisor_alive",
    "shmq_take_bytes": "shmq_take calls it",
}


def killed() -> set[str]:
    """Called between watch_begin and watch_end."""
    found: set[str] = set()
    for file in (ROOT / "tests" / "crash" / "scenes").glob("*.c"):
        text = file.read_text()
        found |= set(
            re.findall(
                r"\b(?:WATCHED|CALL)\((?:\w+(?:->\w+)*, \w+(?:->\w+)*,\s+)?(shmq_\w+)\(", text
            )
        )
        for part in re.findall(r"watch_begin\(\);(.*?)watch_end\(\);", text, re.S):
            found |= set(re.findall(r"\b(shmq_\w+)\(", part))
    return found


def test_every_function_is_killed_or_stores_nothing() -> None:
    names = set(public_functions())
    assert len(names) > 100
    without = names - killed() - STORES_NOTHING - set(KILLED_ELSEWHERE)
    assert not without, (
        "give each an operation in tests/crash/scenes/operations_<noun>.c that calls it inside "
        f"CALL(...) or WATCHED(...), or add it to STORES_NOTHING here: {sorted(without)}"
    )
    gone = (STORES_NOTHING | set(KILLED_ELSEWHERE)) - names
    assert not gone, f"take these out of the lists here, the contract has them no more: {gone}"
