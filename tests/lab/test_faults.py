"""Every fault does what it says, and what it says can be undone is undone."""

import time

import pytest

from tests.lab.faults import boot, devices, machine, model, network, server

pytestmark = pytest.mark.lab

REACHED = ("kpro7", "ct210", "ct201")


@pytest.mark.parametrize("name", ["kpro7", "ct210", "ct201"])
def test_a_reboot_gives_another_boot_id_to_the_machine_and_to_guests_that_go_with_it(lab_to_break, name):
    lab = lab_to_break
    before = {one: lab.boot_id(one) for one in ("kpro6", "kpro7", "ct201", "ct210")}
    boot.reboot(lab, name)
    changed = {one for one, boot_id in before.items() if lab.boot_id(one) != boot_id}
    assert changed == set(boot.affected(name)) & set(before)


def test_a_power_cut_loses_what_was_in_memory_and_keeps_what_was_on_disk(lab_to_break):
    lab = lab_to_break
    lab.check("ct210", ["sh", "-c", "echo kept > /root/disk; echo lost > /dev/shm/memory"])
    boot.power_cut(lab, "kpro7")
    assert lab.check("ct210", ["sh", "-c", "cat /root/disk; ls /dev/shm"]) == "kept\n"


@pytest.mark.parametrize("name", ["kpro7", "ct201"])
def test_a_cut_network_does_not_answer_and_heals(lab_to_break, name):
    lab = lab_to_break
    network.cut(lab, name)
    done = lab.ssh(name, "true", timeout=20)
    assert done.returncode == 255
    assert "timed out" in done.stderr or "No route to host" in done.stderr
    network.cut(lab, name, undo=True)
    lab.wait(name, timeout=20)


@pytest.mark.parametrize("name", REACHED)
def test_a_changed_host_key_is_refused(lab_to_break, name):
    lab = lab_to_break
    network.change_host_key(lab, name)
    done = lab.ssh(name, "true")
    assert done.returncode == 255
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in done.stderr
    network.change_host_key(lab, name, undo=True)
    assert lab.ssh(name, "true").returncode == 0


@pytest.mark.parametrize("name", ["kpro6", "ct202"])
def test_without_python3_there_is_exit_code_127_and_pct_goes_on(lab_to_break, name):
    lab = lab_to_break
    machine.remove_python3(lab, name)
    assert lab.run(name, ["sh", "-c", "python3 -c 1"]).returncode == 127
    assert lab.check("kpro6", ["pct", "status", "202"]) == "status: running\n"
    machine.remove_python3(lab, name, undo=True)
    assert lab.check(name, ["python3", "-c", "print(1)"]) == "1\n"


@pytest.mark.parametrize("name", ["kpro7", "ct201"])
def test_a_full_disk_takes_no_byte_more(lab_to_break, name):
    lab = lab_to_break
    machine.fill_disk(lab, name)
    done = lab.run(name, ["dd", "if=/dev/zero", "of=/root/x", "bs=10", "count=1"])
    assert "No space left on device" in done.stderr
    machine.fill_disk(lab, name, undo=True)
    assert lab.run(name, ["sh", "-c", "echo x > /root/x"]).returncode == 0


def test_a_clock_that_differs_is_seen_over_ssh_and_only_there(lab_to_break):
    lab = lab_to_break
    machine.shift_clock(lab, "ct210", 3600)
    seen = int(lab.ssh("ct210", "date", "+%s").stdout)
    assert abs(seen - time.time() - 3600) < 60
    assert abs(int(lab.ssh("kpro7", "date", "+%s").stdout) - time.time()) < 60
    machine.shift_clock(lab, "ct210", 0, undo=True)
    assert abs(int(lab.ssh("ct210", "date", "+%s").stdout) - time.time()) < 60


@pytest.fixture
def weights(lab_to_break):
    """A model in a tmpfs of a guest: metadata, and weights that are links into a cache."""
    lab = lab_to_break
    lab.check(
        "ct210",
        ["sh", "-ec", """
        mkdir -p /run/gpuctl/models; mount -t tmpfs -o size=8M models /run/gpuctl/models
        mkdir -p /run/gpuctl/models/m /run/gpuctl/models/blobs; cd /run/gpuctl/models
        echo '{}' > m/config.json
        head -c 100000 /dev/zero > blobs/a; head -c 200000 /dev/zero > blobs/b
        ln -s ../blobs/a m/model-00001-of-00002.safetensors; ln -s ../blobs/b m/model-00002-of-00002.safetensors
        """],
    )  # fmt: skip
    yield "/run/gpuctl/models/m"
    lab.check("ct210", ["umount", "/run/gpuctl/models"])


def test_a_truncated_model_is_short_by_so_many_bytes(lab_to_break, weights):
    assert model.truncate_model(lab_to_break, "ct210", weights, bytes_=3).endswith("00002-of-00002.safetensors")
    assert lab_to_break.check("ct210", ["stat", "-c", "%s", "/run/gpuctl/models/blobs/b"]) == "199997\n"


def test_a_flipped_bit_changes_the_content_and_not_the_size(lab_to_break, weights):
    model.flip_bit(lab_to_break, "ct210", weights)
    script = "import sys; b = open(sys.argv[1], 'rb').read(); print(len(b), sum(map(int.bit_count, b)))"
    seen = lab_to_break.check("ct210", ["python3", "-c", script, "/run/gpuctl/models/blobs/b"])
    assert seen == "200000 1\n"


def test_metadata_without_weights(lab_to_break, weights):
    model.remove_weights(lab_to_break, "ct210", weights)
    listed = lab_to_break.check(
        "ct210", ["sh", "-c", f"ls {weights}; find {weights} -xtype l | wc -l; ls {weights}/../blobs"]
    )
    assert listed.split() == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "2",
    ]


def test_a_wiped_tmpfs_is_empty_and_a_full_one_takes_no_byte(lab_to_break, weights):
    lab = lab_to_break
    model.wipe_tmpfs(lab, "ct210")
    assert lab.check("ct210", ["ls", "-A", "/run/gpuctl/models"]) == ""
    lab.check("ct210", ["sh", "-c", "head -c 100000 /dev/zero > /run/gpuctl/models/file"])
    model.fill_tmpfs(lab, "ct210")
    done = lab.run("ct210", ["dd", "if=/dev/zero", "of=/run/gpuctl/models/x", "bs=10", "count=1"])
    assert "No space left on device" in done.stderr
    model.fill_tmpfs(lab, "ct210", undo=True)
    assert lab.run("ct210", ["sh", "-c", "echo x > /run/gpuctl/models/x"]).returncode == 0


def test_a_server_is_killed_or_hangs(lab_to_break):
    lab = lab_to_break
    lab.check("ct210", ["systemd-run", "--unit=served", "sleep", "1000"])
    server.hang_server(lab, "ct210", "served")
    pid = lab.check("ct210", ["systemctl", "show", "-P", "MainPID", "served"]).strip()
    assert lab.check("ct210", ["sh", "-c", f"cut -d' ' -f3 /proc/{pid}/stat"]) == "T\n"
    server.hang_server(lab, "ct210", "served", undo=True)
    assert lab.check("ct210", ["sh", "-c", f"cut -d' ' -f3 /proc/{pid}/stat"]) == "S\n"
    server.kill_server(lab, "ct210", "served")
    for _ in range(50):
        if (said := lab.check("ct210", ["systemctl", "show", "-P", "Result", "served"]).strip()) == "signal":
            break
        time.sleep(0.1)
    assert said == "signal"


@pytest.mark.parametrize("name", ["kpro7", "ct210", "ct201"])
def test_a_device_node_is_hidden_stale_or_a_file(lab_to_break, name):
    lab = lab_to_break
    path = "/dev/nvidia-uvm"
    unprivileged = name == "ct201"  # it cannot make device nodes
    if not unprivileged:
        devices.stale_node(lab, name, path, major=508)
        assert lab.check(name, ["stat", "-c", "%t %a %F", path]) == "1fc 666 character special file\n"
    devices.file_for_node(lab, name, path)
    assert lab.check(name, ["stat", "-c", "%F %a", path]) == "regular empty file 0\n"
    devices.forbid_node(lab, name, path, mode="0640")
    assert lab.check(name, ["stat", "-c", "%a", path]) == "640\n"
    devices.hide_node(lab, name, path)
    assert lab.run(name, ["test", "-e", path]).returncode == 1
