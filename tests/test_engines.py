"""What engines say of themselves, as their own answers have it."""

from __future__ import annotations

import pytest

from gpuctl import plugins


@pytest.mark.parametrize(("workers", "at_once", "kv_tokens"), [(1, 16, 20480), (8, 128, 163840)])
def test_what_a_data_parallel_sglang_can_hold_is_what_all_its_workers_hold(workers, at_once, kv_tokens):
    one = {"effective_max_running_requests_per_dp": 16, "memory_usage": {"token_capacity": 20480}}
    info = {"dp_size": workers, "max_running_requests": 128, "internal_states": [one] * workers}
    told = plugins.get("engines", "sglang").identity({"/server_info": info})
    assert (told.requests_at_once, told.kv_tokens) == (at_once, kv_tokens)


def test_an_sglang_that_does_not_say_it_of_its_workers_says_it_of_all():
    told = plugins.get("engines", "sglang").identity({"/get_server_info": {"dp_size": 2, "max_running_requests": 128}})
    assert (told.requests_at_once, told.kv_tokens) == (128, None)
