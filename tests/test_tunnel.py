"""A server's port brought here: through a real sshd with its host keys checked, and with the truth where nobody answers."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gpuctl.transport import Guest, Local, Refused, Ssh, Tunnel
from gpuctl.transport.tunnel import command
from tests.sshd import Sshd, free_port

ROOT = Path(__file__).parents[1]


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"x" * 300_000)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    one = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=one.serve_forever, daemon=True).start()
    yield one.server_address
    one.shutdown()
    one.server_close()


@pytest.fixture
def sshd(tmp_path):
    one = Sshd(tmp_path / "sshd", lines=("AllowTcpForwarding no",))
    yield one
    one.stop()


def get(port, data=None):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", data, timeout=60) as answer:
        return answer.read()


def test_a_port_over_ssh_where_no_forwarding_is_allowed(sshd, server):
    with Tunnel(Ssh("box", "machine", config=str(sshd.config)), server) as tunnel:
        assert get(tunnel.port) == b"x" * 300_000
        assert get(tunnel.port, b"y" * 200_000) == b"y" * 200_000
    with pytest.raises(urllib.error.URLError):
        get(tunnel.port)


def test_a_new_host_key_is_not_taken(sshd, server):
    sshd.known_hosts.write_text("")
    with Tunnel(Ssh("box", "machine", config=str(sshd.config)), server) as tunnel:
        with pytest.raises((OSError, http.client.HTTPException)):
            get(tunnel.port)
        for _ in range(100):
            if tunnel.said:
                break
            threading.Event().wait(0.1)
        assert "Host key verification failed" in tunnel.said
    assert sshd.known_hosts.read_text() == ""


def test_nobody_at_the_other_end_is_said():
    with Tunnel(Local("box"), ("127.0.0.1", 9)) as tunnel:
        with pytest.raises((OSError, http.client.HTTPException)):
            get(tunnel.port)
        for _ in range(100):
            if tunnel.said:
                break
            threading.Event().wait(0.1)
        assert tunnel.said == "box: 127.0.0.1:9: Connection refused"


def test_a_guest_is_reached_through_its_node():
    words = command(Guest("ct200", Ssh("kpro6", "kpro6", user="root"), 200), ["python3", "-c", "x y"])
    assert words[0] == "ssh"
    assert words[-1] == "pct exec 200 -- python3 -c 'x y'"
    assert "StrictHostKeyChecking=yes" in words


def test_a_port_that_is_taken_here_is_a_line(server):
    with pytest.raises(Refused, match="Address already in use; --port names another"):
        Tunnel(Local(), server, server[1]).__enter__()


def test_the_verb_says_where_until_ctrl_c(server, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "gpuctl", "tunnel", str(server[1])], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    url = process.stdout.readline().strip()
    assert get(int(url.rpartition(":")[2])) == b"x" * 300_000
    process.send_signal(2)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "timed wrongly" in err) == (0, True)


def test_a_box_that_is_not_there_is_told_before_a_port_is(tmp_path):
    (tmp_path / "hosts.yml").write_text(
        f"all: {{hosts: {{gone: {{ansible_host: 127.0.0.1, ansible_port: {free_port()}}}}}}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "gpuctl", "tunnel", "8080", "-i", str(tmp_path), "-t", "gone"],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("gpuctl: gone: ")
    assert done.stderr.endswith("Connection refused\n")
