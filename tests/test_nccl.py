"""NCCL's variables: the traps its library says nothing about are named; what is right is left in peace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuctl import deploy, nccl
from gpuctl.finding import Severity
from gpuctl.transport import Local


def said(env, **known):
    return [finding.summary for finding in nccl.lint(env, **known)]


@pytest.mark.parametrize(
    ("env", "what"),
    [
        ({"NCCL_P2P_LEVEL": "sys"}, "NCCL_P2P_LEVEL=sys is ignored"),
        ({"NCCL_NET_GDR_LEVEL": "phb"}, "NCCL_NET_GDR_LEVEL=phb is ignored"),
        ({"NCCL_P2P_DISABLE": "2"}, "NCCL_P2P_DISABLE=2 disables nothing: only 1 does"),
        ({"NCCL_P2P_LEVEL": "FOO"}, "NCCL_P2P_LEVEL=FOO is ignored"),
        ({"NCCL_P2P_LEVEL": "2"}, "NCCL_P2P_LEVEL=2 means PXB"),
        ({"NCCL_P2P_LEVEL": "9"}, "NCCL_P2P_LEVEL=9 means SYS"),
        ({"NCCL_P2P_DISABLE": "true"}, "NCCL_P2P_DISABLE=true is read as 0"),
        ({"NCCL_P2P_LEVEL": "SYS", "NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1 wins over NCCL_P2P_LEVEL"),
        ({"NCCL_IB_DISABLE": "yes"}, "NCCL_IB_DISABLE=yes is read as 0"),
        ({"NCCL_BUFFSIZE": "8M"}, "NCCL_BUFFSIZE=8M is read as 8: NCCL knows no units"),
        ({"NCCL_MIN_NCHANNELS": "eight"}, "NCCL_MIN_NCHANNELS=eight is read as 0"),
        ({"NCCL_MIN_NCHANNELS": "08"}, "NCCL_MIN_NCHANNELS=08 is read as octal"),
        ({"NCCL_MIN_NCHANNELS": "32", "NCCL_MAX_NCHANNELS": "8"}, "NCCL_MIN_NCHANNELS is above NCCL_MAX_NCHANNELS"),
        ({"NCCL_ALGO": "Tree"}, "NCCL_ALGO=Tree leaves Broadcast, Reduce, AllGather, ReduceScatter without"),
        ({"NCCL_ALGO": "^Ring"}, "NCCL_ALGO=^Ring leaves Broadcast, Reduce without"),
        ({"NCCL_ALGO": "ring;allreduce:pat"}, "leaves AllReduce without an algorithm"),
        ({"NCCL_ALGO": "Rnig"}, "NCCL does not know Rnig"),
        ({"NCCL_ALGO": "ring;allreduc:tree"}, "NCCL does not know allreduc"),
        ({"NCCL_ALGO": "ring;tree"}, "NCCL does not know tree (only the first part"),
        ({"NCCL_PROTO": "LL64"}, "NCCL does not know LL64"),
        ({"NCCL_PROTO": "LL,LL128"}, "NCCL_PROTO=LL,LL128 forces LL128"),
        ({"NCCL_PROTO": "^LL"}, "NCCL_PROTO=^LL forces LL128"),
        ({"NCCL_P2PLEVEL": "SYS"}, "NCCL_P2PLEVEL is no variable of NCCL"),
        ({"nccl_proto": "LL"}, "nccl_proto is nobody's"),
    ],
)  # fmt: skip
def test_a_trap_is_named(env, what):
    assert any(what in one for one in said(env)), said(env)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"PATH": "x", "CUDA_HOME": "true"},
        {"NCCL_P2P_LEVEL": "SYS", "NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_MIN_NCHANNELS": "8"},
        {"NCCL_PROTO": "^LL128"},
        {"NCCL_PROTO": "^LL128;allreduce:LL"},
        {"NCCL_PROTO": "^Simple,LL128"},
        {"NCCL_ALGO": "ring,collnetdirect;allreduce:tree,collnetdirect;broadcast:ring"},
        {"NCCL_ALGO": "allreduce:Tree", "NCCL_DEBUG": "INFO"},  # a function without an entry keeps all
        {"NCCL_BUFFSIZE": "0x400000", "NCCL_CUMEM_ENABLE": "-2", "NCCL_SHM_DISABLE": ""},
        {"NCCL_SOCKET_IFNAME": "^docker,lo", "NCCL_GRAPH_FILE": "/etc/graph.xml"},
    ],
)
def test_what_is_right_is_left_in_peace(env):
    assert said(env) == []


def test_ll128_is_fine_over_nvlink_and_dangerous_without():
    assert said({"NCCL_PROTO": "LL128"}, nvlink=True) == []
    (finding,) = nccl.lint({"NCCL_PROTO": "LL128"}, nvlink=False)
    assert finding.severity is Severity.CRITICAL


@pytest.mark.parametrize("name", list(nccl.PROFILES))
def test_profiles_pass_their_own_lint_and_give_their_reason(name):
    assert said(nccl.environment(name), nvlink=False) == []
    assert nccl.PROFILES[name].reason
    assert nccl.PROFILES[name].source


def test_an_unknown_profile_and_none():
    assert nccl.environment(None) == {}
    with pytest.raises(KeyError):
        nccl.environment("fast")


def test_spaces_in_nccl_conf_are_named():
    found = nccl.lint_conf("# mine\nNCCL_DEBUG = INFO\nNCCL_PROTO=LL\nnonsense\n", "/etc/nccl.conf")
    assert [finding.summary for finding in found] == [
        "/etc/nccl.conf line 2 sets a variable 'NCCL_DEBUG ' to ' INFO': NCCL keeps the spaces",
        "/etc/nccl.conf line 4 has no `=` and is skipped: nonsense",
    ]


def test_what_an_nccl_conf_sets_has_the_same_traps_but_where_the_server_sets_it_itself():
    text = "NCCL_P2P_LEVEL=sys\nNCCL_P2P_LEVEL=SYS\nNCCL_ALGO=Tree\nNCCL_SHM_DISABLE=true\n"
    found = [trap.summary for trap in nccl.lint_conf(text, "/etc/nccl.conf")]
    assert found == [
        "/etc/nccl.conf: NCCL_SHM_DISABLE=true is read as 0: NCCL knows numbers only",
        "/etc/nccl.conf: NCCL_P2P_LEVEL=sys is ignored: levels are compared letter by letter",  # the first one counts
        "/etc/nccl.conf: NCCL_ALGO=Tree leaves Broadcast, Reduce, AllGather, ReduceScatter without an algorithm: NCCL "
        "ends when asked for one",
    ]
    mine = {"NCCL_P2P_LEVEL": "SYS", "NCCL_ALGO": "Ring", "NCCL_SHM_DISABLE": "0"}
    assert nccl.lint_conf(text, "/etc/nccl.conf", mine) == ()
    both = nccl.lint_conf("NCCL_P2P_LEVEL=SYS\n", "/etc/nccl.conf", {"NCCL_P2P_DISABLE": "1"})
    assert [trap.summary for trap in both] == ["/etc/nccl.conf: NCCL_P2P_DISABLE=1 wins over NCCL_P2P_LEVEL"]


def test_an_nccl_conf_of_another_system_is_named():
    (found,) = nccl.lint_conf("NCCL_P2P_LEVEL=SYS\r\n", "/etc/nccl.conf")
    assert "line 1 sets a variable 'NCCL_P2P_LEVEL' to 'SYS\\r'" in found.summary


def test_the_nccl_conf_that_the_server_would_read_is_read(tmp_path):
    conf = tmp_path / "nccl.conf"
    conf.write_text("NCCL_P2P_LEVEL=sys\nNCCL_DEBUG=INFO")

    def of_it(env, user=None):  # the machine may have one of its own
        found = deploy.conf_traps(Local(), {"NCCL_CONF_FILE": str(conf), **env}, user)
        return [trap.summary.removeprefix(f"{conf}: ") for trap in found if trap.summary.startswith(str(conf))]

    assert of_it({}) == ["NCCL_P2P_LEVEL=sys is ignored: levels are compared letter by letter"]
    assert of_it({"NCCL_P2P_LEVEL": "SYS"}, "nobody") == []


@given(
    st.dictionaries(
        st.sampled_from(["NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LEVEL", "NCCL_BUFFSIZE", "NCCL_X"]), st.text()
    )
)
def test_any_value_is_read(env):
    for finding in nccl.lint(env):
        assert finding.summary


@given(st.text(st.sampled_from(list("NCCL_P2LEV=sS1 #\t\r\n")) | st.characters()), st.text())
def test_any_conf_is_read(text, level):
    for finding in nccl.lint_conf(text, "f", {"NCCL_P2P_LEVEL": level}):
        assert finding.summary
