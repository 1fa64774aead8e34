"""Running commands on this machine."""

from __future__ import annotations

import pytest

from gpuctl.transport import Local, TimedOut
from tests.patience import ends_within


def test_output_error_and_exit_code():
    got = Local().run(["sh", "-c", "cat; echo no >&2; exit 3"], stdin=b"hello")
    assert (got.rc, got.stdout, got.stderr) == (3, b"hello", b"no\n")


def test_a_megabyte_goes_in_and_comes_out():
    data = b"x" * 1_000_000
    assert Local().run(["cat"], stdin=data).stdout == data


def test_a_program_that_ignores_its_input():
    assert Local().run(["true"], stdin=b"x" * 1_000_000).rc == 0


def test_a_missing_command_is_127():
    assert Local().run(["no-such-command-at-all"]).rc == 127


def test_a_hang_ends_in_time_with_all_its_children():
    with ends_within(5), pytest.raises(TimedOut):
        Local().run(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.3)


def test_output_is_handed_over_as_it_comes():
    seen = []
    got = Local().run(["sh", "-c", "echo a; sleep 0.2; echo b"], on_stdout=lambda data: seen.append(data))
    assert seen == [b"a\n", b"b\n"]
    assert got.stdout == b""


def test_a_chatty_command_ends_in_time_too():
    with pytest.raises(TimedOut):
        Local().run(["yes"], timeout=0.3, on_stdout=lambda data: None)


def test_a_command_that_closed_its_output_and_runs_on():
    with pytest.raises(TimedOut, match=r"^here: sh -c .* did not end within 0\.3 s$"):
        Local("here").run(["sh", "-c", "exec >&- 2>&-; sleep 60"], timeout=0.3)


def test_a_file_that_may_not_be_executed_is_126(tmp_path):
    (tmp_path / "data").write_text("")
    assert Local().run([str(tmp_path / "data")]).rc == 126
