"""A machine over SSH, against a real sshd on loopback: what works, and one clear line for what does not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import paramiko
import pytest
from sshd import NO_BASHRC, Sshd, free_port, make_key

import gpuctl.transport.ssh
from gpuctl.background import begin
from gpuctl.transport import Refused, Ssh, TimedOut, Unreachable, agent, each
from gpuctl.waiting import reached
from tests.patience import ends_within, wait_until


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    one = Sshd(tmp_path_factory.mktemp("sshd"))
    yield one
    one.stop()


@pytest.fixture(scope="module")
def machine(sshd):
    one = Ssh("box", "machine", config=str(sshd.config))
    yield one
    one.close()


@pytest.fixture
def server(tmp_path):
    """`server(name, ...)` starts a further sshd; all end with the test."""
    with contextlib.ExitStack() as stack:

        def start(name="other", **how):
            one = Sshd(tmp_path / name, **how)
            stack.callback(one.stop)
            return one

        yield start


def config(tmp_path, text):
    file = tmp_path / "ssh_config"
    file.write_text(text)
    return str(file)


def refusal(kind, one):
    """The one line with which running a command ends."""
    try:
        with pytest.raises(kind) as caught:
            one.run(["true"])
    finally:
        one.close()
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(one.name + ": ")
    return line


# What works


def test_output_error_and_exit_code(machine):
    got = machine.run(["sh", "-c", "cat; echo no >&2; exit 3"], stdin=b"hello")
    assert (got.rc, got.stdout, got.stderr) == (3, b"hello", b"no\n")


def test_words_arrive_as_they_were_sent(machine):
    words = ["a b", "$HOME", "'", '"', "*", "\\", "", "a\nb", "~", "ü", ";exit 9", "-n"]
    got = machine.run(["printf", "%s\\0", *words])
    assert got.stdout.decode().split("\0")[:-1] == words


def test_five_megabytes_go_in_and_come_out_at_the_speed_of_the_network(machine):
    data = os.urandom(5_000_000)
    with ends_within(5):
        assert machine.run(["cat"], stdin=data).stdout == data


def test_a_program_that_ignores_its_input(machine):
    assert machine.run(["true"], stdin=b"x" * 5_000_000).rc == 0


def test_a_missing_command_is_127_and_a_signal_is_negative(machine):
    assert machine.run(["no-such-command-at-all"]).rc == 127
    assert machine.run(["no-such-command-at-all"], timeout=5).rc == 127
    assert machine.run(["sh", "-c", "kill -9 $$"]).rc == -signal.SIGKILL
    assert machine.run(["sh", "-c", "kill -9 $$"], timeout=5).rc == -signal.SIGKILL


def test_output_is_handed_over_as_it_comes(machine):
    seen = []
    got = machine.run(["sh", "-c", "echo a; sleep 0.3; echo b"], on_stdout=seen.append)
    assert seen == [b"a\n", b"b\n"]
    assert got.stdout == b""


def test_an_agent_runs_from_its_standard_input(machine, tmp_path, monkeypatch):
    (tmp_path / "greet.py").write_text("import json, sys\nprint('hello', json.loads(sys.stdin.readline())['who'])\n")
    monkeypatch.setattr("gpuctl.transport.agents.AGENTS", tmp_path)
    argv, stdin = agent("greet", {"who": "Ada"})
    assert machine.run(argv, stdin=stdin).text == "hello Ada\n"


def test_several_commands_at_once_on_one_connection(machine, tmp_path):
    each_waits_for_all = f"touch {tmp_path}/$0; until [ $(ls {tmp_path} | wc -l) = 4 ]; do sleep 0.05; done; echo met"
    with ThreadPoolExecutor(4) as pool:
        done = pool.map(lambda name: machine.run(["sh", "-c", each_waits_for_all, name], timeout=30), "abcd")
    assert [one.text for one in done] == ["met\n"] * 4


def test_a_hang_ends_in_time_and_is_ended_there_too(machine, tmp_path):
    mark = tmp_path / "pid"
    for limit in (0.5, 5, 20):  # on a busy machine it takes a while until the command has begun
        with ends_within(limit + 1), pytest.raises(TimedOut, match=rf"box: .* did not end within {limit:g} s"):
            machine.run(["sh", "-c", f"echo $$ > {mark}; exec sleep 60"], timeout=limit)
        if mark.exists():
            break
    with ends_within(5):
        assert wait_until(lambda: not os.path.exists(f"/proc/{int(mark.read_text())}"))


def test_a_chatty_command_ends_in_time_too(machine):
    with pytest.raises(TimedOut):
        machine.run(["yes"], timeout=0.5, on_stdout=lambda data: None)


def test_a_command_that_closed_its_output_and_runs_on(machine):
    with pytest.raises(TimedOut):
        machine.run(["sh", "-c", "exec >&- 2>&-; sleep 60"], timeout=0.5)


def test_nothing_is_written_to_our_own_output(sshd, tmp_path):
    script = (
        "from gpuctl.transport import Ssh, TransportError\n"
        "no = ['-o', 'UserKnownHostsFile=none']\n"
        f"one = Ssh('box', '127.0.0.1', port={sshd.port}, config='/dev/null', options=no)\n"
        "try:\n    one.run(['true'])\nexcept TransportError:\n    pass\n"
    )
    done = subprocess.run([os.sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Host keys


def test_an_unknown_host_key_is_refused_and_not_added(sshd, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text("")
    one = Ssh("box", "machine", config=str(sshd.config), options=["-o", f"UserKnownHostsFile={known}"])
    line = refusal(Refused, one)
    assert f"no line for [127.0.0.1]:{sshd.port} in {known}" in line
    assert "ssh-ed25519 SHA256:" in line
    assert "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub" in line
    assert known.read_text() == ""


def test_an_inventory_cannot_turn_the_check_off(sshd):
    options = ["-o", "UserKnownHostsFile=/dev/null", "-o", "StrictHostKeyChecking=no"]
    refusal(Refused, Ssh("box", "machine", config=str(sshd.config), options=options))


def test_a_changed_host_key_is_refused_and_file_and_line_are_named(sshd, tmp_path):
    known = tmp_path / "known_hosts"
    kind, blob = make_key(tmp_path / "old").with_suffix(".pub").read_text().split()[:2]
    known.write_text(f"# mine\n[127.0.0.1]:{sshd.port} {kind} {blob}\n")
    before = known.read_text()
    line = refusal(
        Refused, Ssh("box", "machine", config=str(sshd.config), options=["-o", f"UserKnownHostsFile={known}"])
    )
    assert "HAS CHANGED" in line
    assert f"{known} line 2" in line
    assert f"ssh-keygen -f {known} -R '[127.0.0.1]:{sshd.port}'" in line
    assert known.read_text() == before


@pytest.mark.parametrize(
    "kind", ["hashed", "pattern", "without port", "second of its type", "alias", "other type first"]
)
def test_host_keys_are_believed_where_openssh_believes_them(sshd, tmp_path, kind):
    known = tmp_path / "known_hosts"
    name = f"[127.0.0.1]:{sshd.port}"
    options = ["-o", f"UserKnownHostsFile={known}"]
    other = " ".join(make_key(tmp_path / "other").with_suffix(".pub").read_text().split()[:2])
    rsa = " ".join(make_key(tmp_path / "rsa", "rsa").with_suffix(".pub").read_text().split()[:2])
    known.write_text(
        {
            "hashed": sshd.known_line(),
            "pattern": sshd.known_line("[127.0.0.*]:*"),
            "without port": sshd.known_line("127.0.0.1"),
            "second of its type": f"{name} {other}\n" + sshd.known_line(),
            "alias": sshd.known_line("the-box"),
            "other type first": f"{name} {rsa}\n" + sshd.known_line(),
        }[kind]
    )
    if kind == "hashed":
        subprocess.run(["ssh-keygen", "-q", "-H", "-f", known], check=True, capture_output=True)
        assert "127.0.0.1" not in known.read_text()
    if kind == "alias":
        options += ["-o", "HostKeyAlias=the-box"]
    one = Ssh("box", "machine", config=str(sshd.config), options=options)
    assert one.run(["echo", "in"]).text == "in\n"
    one.close()


def test_a_revoked_host_key_is_refused_although_it_is_listed(sshd, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text(sshd.known_line() + "@revoked " + sshd.known_line("*"))
    line = refusal(
        Refused, Ssh("box", "machine", config=str(sshd.config), options=["-o", f"UserKnownHostsFile={known}"])
    )
    assert f"is revoked in {known} line 2" in line


# Logging in


def test_a_refused_login_names_the_key(sshd, tmp_path):
    key = make_key(tmp_path / "stranger")
    sshd_config = config(tmp_path, sshd.config.read_text().replace(str(sshd.key), str(key)))
    line = refusal(Refused, Ssh("box", "machine", config=sshd_config))
    assert f"login refused: it refused {key}" in line


def test_a_key_that_needs_its_passphrase_is_named(sshd, tmp_path):
    key = make_key(tmp_path / "locked", passphrase="open sesame")
    sshd_config = config(tmp_path, sshd.config.read_text().replace(str(sshd.key), str(key)))
    line = refusal(Refused, Ssh("box", "machine", config=sshd_config))
    assert f"{key} needs its passphrase: ssh-add {key}" in line


def test_no_key_at_all_and_a_file_that_is_none(sshd, tmp_path):
    (tmp_path / "text").write_text("this is no key\n")
    sshd_config = config(tmp_path, sshd.config.read_text().replace(str(sshd.key), str(tmp_path / "text")))
    line = refusal(Refused, Ssh("box", "machine", config=sshd_config))
    assert "there is no key to offer" in line
    assert f"{tmp_path}/text is no key we can read" in line


def test_the_agents_key_logs_in(sshd, tmp_path, monkeypatch):
    talk = subprocess.run(["ssh-agent", "-s", "-a", tmp_path / "agent"], capture_output=True, text=True, check=True)
    pid = int(talk.stdout.split("SSH_AGENT_PID=")[1].split(";")[0])
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        subprocess.run(["ssh-add", "-q", make_key(tmp_path / "wrong")], check=True)
        subprocess.run(["ssh-add", "-q", sshd.key], check=True)
        text = sshd.config.read_text().replace(f"IdentityFile {sshd.key}", "IdentityFile none")
        one = Ssh("box", "machine", config=config(tmp_path, text.replace("IdentitiesOnly yes", "IdentitiesOnly no")))
        assert one.run(["echo", "in"]).text == "in\n"
        one.close()
        # IdentitiesOnly: an agent's key that the configuration does not name is not offered.
        line = refusal(Refused, Ssh("box", "machine", config=config(tmp_path, text)))
        assert "there is no key to offer" in line
    finally:
        os.kill(pid, signal.SIGTERM)


def test_too_many_keys_say_so(server, tmp_path):
    strict = server(lines=("MaxAuthTries 2",))
    keys = [make_key(tmp_path / f"key{n}") for n in range(3)]
    text = strict.config.read_text().replace(
        f"  IdentityFile {strict.key}\n", "".join(f"  IdentityFile {key}\n" for key in keys)
    )
    assert "MaxAuthTries" in refusal(Refused, Ssh("box", "machine", config=config(tmp_path, text)))


def test_an_unknown_option_comes_back_in_the_words_of_ssh(sshd):
    line = refusal(Refused, Ssh("box", "machine", config=str(sshd.config), options=["-o", "Foo=bar"]))
    assert "Bad configuration option: foo" in line


def test_sudo_that_would_ask_is_refused_and_sudo_that_may_works(server, tmp_path):
    # A login shell whose `sudo` is ours: root logs in here, and root needs none.
    (tmp_path / "bin").mkdir()
    sudo = tmp_path / "bin/sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    sudo.chmod(0o755)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    box = server(lines=(f"SetEnv {NO_BASHRC} PATH={path}",))
    one = Ssh("box", "machine", config=str(box.config), sudo=True)
    one.run(["true"])  # connects
    one._chain[-1].user = "ada"
    assert "ada may not become root (sudo: a password is required)" in refusal(Refused, one)
    sudo.write_text("#!/bin/sh\necho 'bash: line 1: sudo: command not found' >&2\nexit 127\n")
    one.run(["true"])
    one._chain[-1].user = "ada"
    assert "there is no sudo for ada to become root by: install it, or log in as root" in refusal(Refused, one)
    sudo.write_text("#!/bin/sh\necho 'sudo: python3: command not found' >&2\nexit 1\n")
    one.run(["true"])
    one._chain[-1].user = "ada"
    assert one.run(["python3"], timeout=30).rc == 127, "which is not sudo's fault"
    sudo.write_text('#!/bin/sh\n[ "$1 $2 $3" = "-n -H --" ] || exit 9\nshift 3\necho as root\nexec "$@"\n')
    one.run(["true"])
    one._chain[-1].user = "ada"
    assert one.run(["echo", "it's"]).text == "as root\nit's\n"
    one.close()


# Jump hosts


def jump_config(tmp_path, target, jump, *, via):
    return config(
        tmp_path,
        f"Host target\n  HostName 127.0.0.1\n  Port {target.port}\n  {via}\n  UserKnownHostsFile {target.known_hosts}\n"
        f"  IdentityFile {target.key}\n"
        f"Host jump\n  HostName 127.0.0.1\n  Port {jump.port}\n  UserKnownHostsFile {jump.known_hosts}\n"
        f"  IdentityFile {jump.key}\n"
        f"Host *\n  User {target.user}\n  IdentitiesOnly yes\n  GlobalKnownHostsFile none\n",
    )


def test_through_a_jump_host(server, tmp_path):
    target, jump = server("target"), server("jump")
    one = Ssh("box", "target", config=jump_config(tmp_path, target, jump, via="ProxyJump jump"))
    assert one.run(["sh", "-c", "cat; echo $SSH_CONNECTION"], stdin=b"in ").text.split()[0] == "in"
    assert "Accepted publickey" in jump.log.read_text()
    assert "Accepted publickey" in target.log.read_text()
    one.close()


def test_through_two_jump_hosts(server, tmp_path):
    target, jump, second = server("target"), server("jump"), server("second")
    file = jump_config(tmp_path, target, jump, via=f"ProxyJump jump,{target.user}@127.0.0.1:{second.port}")
    with open(file, "r+") as text:
        whole = text.read()
        text.seek(0)
        text.write(
            f'Match host 127.0.0.1 exec "test %p = {second.port}"\n'
            f"  UserKnownHostsFile {second.known_hosts}\n  IdentityFile {second.key}\n" + whole
        )
    one = Ssh("box", "target", config=file)
    assert one.run(["echo", "in"]).text == "in\n"
    assert "Accepted publickey" in second.log.read_text()
    one.close()


def test_through_a_proxy_command(server, tmp_path):
    target, jump = server("target"), server("jump")
    via = f"ProxyCommand ssh -F {tmp_path}/ssh_config -W %h:%p jump"
    one = Ssh("box", "target", config=jump_config(tmp_path, target, jump, via=via))
    assert one.run(["echo", "in"]).text == "in\n"
    assert "Accepted publickey" in jump.log.read_text()
    one.close()


def test_a_proxy_command_that_ends_at_once_is_unreachable_at_once(server, tmp_path):
    target = server("target")
    config = jump_config(tmp_path, target, target, via="ProxyCommand false")
    with ends_within(5):
        assert "proxy command" in refusal(Unreachable, Ssh("box", "target", config=config))


def test_the_host_key_of_the_jump_host_is_checked_too(server, tmp_path):
    target, jump = server("target"), server("jump")
    jump.known_hosts.write_text(target.known_line(f"[127.0.0.1]:{jump.port}"))
    line = refusal(Refused, Ssh("box", "target", config=jump_config(tmp_path, target, jump, via="ProxyJump jump")))
    assert "HAS CHANGED" in line
    assert f"127.0.0.1:{jump.port}" in line
    assert "Accepted" not in target.log.read_text()


def test_a_jump_host_that_does_not_reach_the_machine_and_one_that_may_not(server, tmp_path):
    target, jump = server("target"), server("jump")
    target.stop()
    line = refusal(Unreachable, Ssh("box", "target", config=jump_config(tmp_path, target, jump, via="ProxyJump jump")))
    assert f"does not reach 127.0.0.1:{target.port}" in line
    closed = server("closed", lines=("AllowTcpForwarding no",))
    line = refusal(Refused, Ssh("box", "target", config=jump_config(tmp_path, target, closed, via="ProxyJump jump")))
    assert "does not allow connections" in line


def test_jump_hosts_in_a_circle_are_refused(tmp_path):
    file = config(tmp_path, "Host a\n  ProxyJump b\nHost b\n  ProxyJump a\n")
    line = refusal(Refused, Ssh("box", "a", config=file))
    assert "circle" in line or "ProxyJump" in line


# Machines that are not there


def test_nobody_listens():
    line = refusal(Unreachable, Ssh("box", "127.0.0.1", port=free_port(), config="/dev/null"))
    assert "Connection refused" in line


def test_a_name_nobody_knows():
    line = refusal(Unreachable, Ssh("box", "no-such-machine.invalid", config="/dev/null"))
    assert "no-such-machine.invalid cannot be resolved" in line


@pytest.fixture
def mute():
    """Accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_machine_that_accepts_and_says_nothing(mute):
    with ends_within(4):
        refusal(Unreachable, Ssh("box", "127.0.0.1", port=mute, config="/dev/null", connect_timeout=1))


def test_closing_does_not_wait_for_a_machine_that_says_nothing(mute):
    one = Ssh("box", "127.0.0.1", port=mute, config="/dev/null", connect_timeout=20)
    asked = begin(lambda: one.run(["true"]))
    time.sleep(0.5)
    with ends_within(1.5):
        one.close()
    assert not asked.done()


def test_a_connection_that_comes_when_nobody_wants_it_any_more_is_closed(server, monkeypatch):
    box, go, coming, connect = server(), threading.Event(), threading.Event(), gpuctl.transport.ssh.login.connect

    def late(*arguments):
        coming.set()
        assert go.wait(60)
        return connect(*arguments)

    one = Ssh("box", "machine", config=str(box.config))
    with monkeypatch.context() as patch:
        patch.setattr(gpuctl.transport.ssh.login, "connect", late)
        asked = begin(lambda: one.run(["true"]))
        assert coming.wait(60)
        one.close()
        go.set()
        with pytest.raises(Unreachable, match="box: closed while it connected"):
            asked.result(60)
    assert wait_until(lambda: not box.children())
    assert one.run(["echo", "anew"]).text == "anew\n"
    one.close()


def test_a_port_where_something_else_answers():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet():
            one, _ = listening.accept()
            one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 200)
            one.close()

        threading.Thread(target=greet, daemon=True).start()
        port = listening.getsockname()[1]
        line = refusal(Unreachable, Ssh("box", "127.0.0.1", port=port, config="/dev/null", connect_timeout=2))
    assert "no SSH server spoke" in line


@pytest.mark.parametrize("first", ["the key exchange", "the version"])
def test_a_port_that_accepts_and_stays_silent(monkeypatch, first):
    wait = 1.0 if first == "the key exchange" else 30.0  # paramiko waits for both, and tells of what ended first
    original = paramiko.Transport.start_client
    monkeypatch.setattr(paramiko.Transport, "start_client", lambda self, timeout: original(self, timeout=wait))
    seconds = 30 if first == "the key exchange" else 1
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        silent = Ssh("box", "127.0.0.1", port=port, config="/dev/null", connect_timeout=seconds)
        with ends_within(20):
            assert refusal(Unreachable, silent).endswith("the machine answered, but no SSH server spoke")


def test_a_machine_that_falls_silent_in_the_middle_is_noticed(server, monkeypatch):
    monkeypatch.setattr(gpuctl.transport.ssh, "SILENCE", 0.5)
    box = server()
    one = Ssh("box", "machine", config=str(box.config), connect_timeout=1)
    assert one.run(["sh", "-c", "sleep 1.2; echo alive"]).text == "alive\n"  # quiet is not gone
    threading.Timer(0.5, box.freeze).start()
    with ends_within(6), pytest.raises(Unreachable, match="connection broke while"):
        one.run(["sleep", "60"])
    one.close()


def test_a_machine_that_goes_away_and_comes_back_is_connected_again(server):
    box = server()
    one = Ssh("box", "machine", config=str(box.config), connect_timeout=2)
    one.run(["true"])
    for pid in box.children():
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    assert one.run(["echo", "back"]).text == "back\n"
    one.close()


def test_waiting_until_it_is_back_ends_when_it_is(server):
    box = server()
    box.process.kill()
    box.process.wait()
    one = Ssh("box", "machine", config=str(box.config), connect_timeout=1)
    heard = []

    def bring_back(error):
        heard.append(str(error))
        if len(heard) == 2:
            box.start()

    assert reached(lambda: one.run(["echo", "in"]), within=30, on_wait=bring_back).text == "in\n"
    assert len(heard) == 2
    one.close()


def test_a_refusal_is_not_tried_again(sshd, tmp_path):
    options = ["-o", "UserKnownHostsFile=none"]
    tries = []

    def work():
        tries.append(1)
        return Ssh("box", "machine", config=str(sshd.config), options=options).run(["true"])

    with pytest.raises(Refused):
        reached(work, within=30)
    assert len(tries) == 1


# Many


def test_thirty_machines_at_once_and_a_mute_one_delays_nobody(sshd, mute):
    machines = [Ssh(f"ct{n}", "machine", config=str(sshd.config)) for n in range(30)]
    machines.insert(3, Ssh("mute", "127.0.0.1", port=mute, config="/dev/null", connect_timeout=60))
    for timeout in (8, 40):  # a machine that is busy otherwise may take longer for thirty logins
        with ends_within(2 * timeout):  # the mute one takes all of it
            done = each(machines, lambda one: one.run(["echo", one.name]).text, limit=8, timeout=timeout)
        assert list(done) == [one.name for one in machines]
        assert isinstance(done.pop("mute"), TimedOut)
        if not any(isinstance(answer, TimedOut) for answer in done.values()):
            break
    assert all(text == f"{name}\n" for name, text in done.items()), done
    for one in machines:
        if one.name != "mute":
            one.close()
