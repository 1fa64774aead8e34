"""What engines say of themselves, as their own answers have it."""

from __future__ import annotations

import pytest

from gpuctl import plugins
from gpuctl.config import Server
from gpuctl.engines import Launch


@pytest.mark.parametrize(("workers", "at_once", "kv_tokens"), [(1, 16, 20480), (8, 128, 163840)])
def test_what_a_data_parallel_sglang_can_hold_is_what_all_its_workers_hold(workers, at_once, kv_tokens):
    one = {"effective_max_running_requests_per_dp": 16, "memory_usage": {"token_capacity": 20480}}
    info = {"dp_size": workers, "max_running_requests": 128, "internal_states": [one] * workers}
    told = plugins.get("engines", "sglang").identity({"/server_info": info})
    assert (told.requests_at_once, told.kv_tokens) == (at_once, kv_tokens)


def test_an_sglang_that_does_not_say_it_of_its_workers_says_it_of_all():
    told = plugins.get("engines", "sglang").identity({"/get_server_info": {"dp_size": 2, "max_running_requests": 128}})
    assert (told.requests_at_once, told.kv_tokens) == (128, None)


@pytest.mark.parametrize("program", [[], ["/opt/vllm/bin/vllm"], ["/opt/vllm/bin/vllm", "serve"]])
def test_vllm_serves_whether_its_program_says_so_or_not(program):
    words = plugins.get("engines", "vllm").argv(Launch("s", Server(engine="vllm", model="m", program=program), "/m"))
    assert words[:3] == ((program or ["vllm"])[0], "serve", "/m")


@pytest.mark.parametrize(
    ("flags", "at_once"),
    [({}, None), ({"max-num-seqs": 32}, 32), ({"max_num_seqs": 32, "data-parallel-size": 4}, 128)],
)
def test_what_a_vllm_runs_at_once_is_what_its_flags_say(flags, at_once):
    launch = Launch("s", Server(engine="vllm", model="m", flags=flags), "/m")
    assert plugins.get("engines", "vllm").requests_at_once(launch) == at_once


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_may_be_given_as_clients_are_given_it(url):
    assert Launch("s", Server(engine="external", url=url)).base_url == "http://h:1"


@pytest.mark.parametrize(
    "url", ["h:1", "127.0.0.1:8000", "ftp://h", "http://", "http://h:99999", "http://h:0", "http://h /x"]
)
def test_an_address_that_is_none_is_no_server(url):
    with pytest.raises(ValueError, match=r"http://host:port"):
        Server(engine="external", url=url)
