"""Megatron-Core's forward-backward functions by name."""

from __future__ import annotations

NO_PIPELINING = "forward_backward_no_pipelining"
WITHOUT_INTERLEAVING = "forward_backward_pipelining_without_interleaving"
WITH_INTERLEAVING = "forward_backward_pipelining_with_interleaving"
COMBINED_NO_PIPELINING = "combined_1f1b_schedule_for_no_pipelining"
COMBINED_INTERLEAVED = "combined_1f1b_schedule_for_interleaved_pipelining"

SCHEDULES = {
    NO_PIPELINING: "sequential",
    WITHOUT_INTERLEAVING: "1f1b",
    WITH_INTERLEAVING: "interleaved_1f1b",
    COMBINED_NO_PIPELINING: "combined_1f1b",
    COMBINED_INTERLEAVED: "combined_1f1b",
}
"""The Program that each function plays; with ``overlap_moe_expert_parallel_comm`` all of them play the combined one."""

CHUNKED = (WITH_INTERLEAVING, COMBINED_INTERLEAVED)
UNPIPELINED = (NO_PIPELINING, COMBINED_NO_PIPELINING)
