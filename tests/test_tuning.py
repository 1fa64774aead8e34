"""Settings of a node: what a profile wants of a machine that was seen, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gpuctl import render, tuning
from gpuctl.box import Box, Snapshot, Wanted
from gpuctl.cli import tune
from gpuctl.tuning import CannotTune, Wishes, wanted

DOCUMENT = json.loads((Path(__file__).parent / "machines/kpro6.json").read_text())
KPRO6 = Snapshot(DOCUMENT)


def by_name(settings):
    return {setting.name: setting for setting in settings}


def test_none_wants_nothing():
    assert wanted(KPRO6, "none") == ()


@pytest.mark.parametrize(("profile", "pages"), [("latency", "madvise"), ("throughput", "always")])
def test_a_profile_says_what_it_saw_what_it_wants_and_why(profile, pages):
    found = by_name(wanted(KPRO6, profile))
    balancing = found["kernel.numa_balancing"]
    assert (balancing.seen, balancing.want, balancing.well) == ("1", "0", False)
    assert balancing.command == "echo 0 > /proc/sys/kernel/numa_balancing"
    assert found["governor policy0"].seen == "schedutil"
    assert (found["transparent huge pages"].seen, found["transparent huge pages"].want) == ("madvise", pages)
    assert found["persistence mode 0000:23:00.0"].well
    assert all(setting.reason and setting.source for setting in found.values())


def test_one_numa_node_has_nothing_to_balance():
    document = json.loads(json.dumps(DOCUMENT))
    document["files"] = {path: text for path, text in document["files"].items() if "node1" not in path}
    assert "kernel.numa_balancing" not in by_name(wanted(Snapshot(document), "latency"))


def test_a_machine_that_says_nothing_is_not_called_well():
    found = wanted(Snapshot({}), "latency")
    assert [setting.seen for setting in found] == [None]
    assert not found[0].well


def test_read_requests_of_gpus_and_ports_above_them():
    found = by_name(wanted(KPRO6, "none", Wishes(max_read_request=4096)))
    gpu, switch, root = (found[f"MaxReadReq {address}"] for address in ("0000:23:00.0", "0000:22:00.0", "0000:20:01.1"))
    assert gpu.command == "setpci -s 0000:23:00.0 CAP_EXP+8.w=5000:7000"
    assert (gpu.in_words(gpu.seen), gpu.in_words(gpu.want)) == ("512 B", "4096 B")
    assert switch.how.get("may_ignore")
    assert "may_ignore" not in root.how
    assert "may_ignore" not in gpu.how
    assert "MaxReadReq 0000:23:00.1" not in found  # the audio function of the card
    assert len(found) == 8 + 8 + 4 + 4


addresses = st.from_regex(r"[0-9a-f]{4}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", fullmatch=True)


@given(
    addresses, st.sampled_from(tuning.READ_REQUESTS), st.none() | st.sampled_from(tuning.READ_REQUESTS), st.booleans()
)
def test_only_the_bits_of_max_read_request_are_ever_written_and_only_to_one_function(address, size, seen, ignore):
    setting = tuning.read_request(address, size, seen=seen, may_ignore=ignore)
    for value in (setting.want, *([setting.seen] if setting.seen else [])):  # undo writes what was seen
        line = [word.replace("{value}", value) for word in setting.how["set"]]
        assert line[:3] == ["setpci", "-s", address]
        assert re.fullmatch(r"CAP_EXP\+8\.w=[0-5]000:7000", line[3])
        assert len(line) == 4


@given(
    st.text(max_size=20) | st.sampled_from(["41:00.0", "0000:41:00", "*", "0000:41:00.*", "10de:", "0000:41:00.8", ""])
)
def test_what_is_no_full_address_is_refused(text):
    if re.fullmatch(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]", text):
        return
    with pytest.raises(CannotTune):
        tuning.read_request(text, 512)


@given(st.integers(-(2**16), 2**16))
def test_sizes_there_are_none_of_are_refused(size):
    if size in tuning.READ_REQUESTS:
        return
    with pytest.raises(CannotTune, match="there are 128, 256, 512"):
        tuning.read_request("0000:41:00.0", size)


def test_access_control_is_seen_and_its_redirection_alone_is_cleared():
    found = by_name(wanted(KPRO6, "none", Wishes(no_acs_redirect=True)))
    port = found["ACS redirect 0000:22:00.0"]
    assert port.command == "setpci -s 0000:22:00.0 ECAP_ACS+6.w=000:00c"
    assert port.in_words(port.seen) == "requests and completions"
    assert "ACS redirect 0000:23:00.0" not in found


def with_driver(driver):
    document = json.loads(json.dumps(DOCUMENT))
    document["pci"]["devices"]["0000:44:00.0"]["driver"] = driver
    return Snapshot(document)


@pytest.mark.parametrize("machine", [with_driver("vfio-pci"), Snapshot({**DOCUMENT, "nodes": {"/dev/vfio/12": {}}})])
def test_access_control_stays_while_virtual_machines_rely_on_it(machine):
    with pytest.raises(CannotTune, match=r"is for virtual machines \(VFIO\)"):
        wanted(machine, "none", Wishes(no_acs_redirect=True))


def test_power_within_the_cards_own_range():
    found = by_name(wanted(KPRO6, "none", Wishes(power_w=450)))
    limit = found["power limit 0000:23:00.0"]
    assert (limit.seen, limit.want) == ("600.00", "450.00")
    assert limit.command == "nvidia-smi -i 0000:23:00.0 -pl 450.00"
    with pytest.raises(CannotTune, match=r"power: 200 W is outside of what GPU 0000:23:00.0 .* takes: 300 to 600 W"):
        wanted(KPRO6, "none", Wishes(power_w=200))
    with pytest.raises(CannotTune, match="no GPU answered"):
        wanted(Snapshot({}), "none", Wishes(power_w=450))


def test_an_unknown_profile_and_an_unknown_tree():
    with pytest.raises(CannotTune, match="'fast' is not known; there are none, latency, throughput"):
        wanted(KPRO6, "fast")
    with pytest.raises(CannotTune, match="PCIe: "):
        wanted(Snapshot({}), "none", Wishes(max_read_request=512))


def test_a_guest_is_kept_on_the_numa_node_of_its_gpus():
    assert tuning.guest_cpus(KPRO6, ["0000:23:00.0", "0000:24:00.0"]) == (
        "lxc.cgroup2.cpuset.cpus: 0-63,128-191",
        "lxc.cgroup2.cpuset.mems: 0",
    )
    with pytest.raises(CannotTune, match="its GPUs are on NUMA nodes 0 and 1: it belongs on all of them"):
        tuning.guest_cpus(KPRO6, ["0000:23:00.0", "0000:a3:00.0"])
    with pytest.raises(CannotTune, match="PCIe: "):
        tuning.guest_cpus(Snapshot({}), ["0000:23:00.0"])


CONF = "arch: amd64\ncores: 8\nlxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n\n[snap]\ncores: 2\n"


def box(conf):
    node = {**DOCUMENT, "files": {**DOCUMENT["files"], "/etc/pve/lxc/200.conf": conf}}
    return Box(Snapshot({}), Snapshot(node), Wanted(vmid=200))


def test_the_lines_are_written_once_never_over_others_and_taken_out_again():
    edit = tuning.guest_edit(box(CONF))
    assert edit.difference() == ["+ lxc.cgroup2.cpuset.cpus: 0-63,128-191", "+ lxc.cgroup2.cpuset.mems: 0"]
    assert str(edit.after).endswith("cpuset.mems: 0\n\n[snap]\ncores: 2\n")
    assert not tuning.guest_edit(box(str(edit.after))).changes_file
    other = str(edit.after).replace("0-63,128-191", "0-3")
    with pytest.raises(CannotTune, match=r"200.conf line 4 says lxc.cgroup2.cpuset.cpus: 0-3; if it may go"):
        tuning.guest_edit(box(other))
    assert str(tuning.guest_edit(box(other), undo=True).after) == CONF


def test_only_the_functions_that_are_named():
    wishes = Wishes(max_read_request=4096, no_acs_redirect=True, only=("0000:23:00.0", "0000:20:01.1"))
    assert set(by_name(wanted(KPRO6, "none", wishes))) == {
        "MaxReadReq 0000:23:00.0", "MaxReadReq 0000:20:01.1", "ACS redirect 0000:20:01.1",
    }  # fmt: skip
    for address, why in (("0000:99:00.0", "is not there; there are 0000:20:01.1"), ("41:00.0", "is not of the form")):
        with pytest.raises(CannotTune, match=why):
            wanted(KPRO6, "none", Wishes(max_read_request=4096, only=(address,)))


def test_settings_are_what_the_module_takes():
    for setting in wanted(KPRO6, "latency", Wishes(4096, 450, True)):
        job = setting.as_job()
        assert ("file" in job) != ("read" in job and "set" in job)
        assert json.loads(json.dumps(job)) == job


def test_what_nvml_told_a_user_counts_where_root_was_not_asked():
    document = {**DOCUMENT, "nvml": {"user": DOCUMENT["nvml"]["root"]}}
    wishes = Wishes(power_w=450)
    assert wanted(Snapshot(document), "latency", wishes) == wanted(KPRO6, "latency", wishes)


@pytest.mark.parametrize(("watts", "fits"), [(300, False), (301, True), (599, True), (600, False)])
def test_a_range_of_odd_milliwatts_is_kept(watts, fits):
    document = json.loads(json.dumps(DOCUMENT))
    for gpu in document["nvml"]["root"]["gpus"]:
        gpu["power_limit_range_mw"] = [300_500, 599_500]
    if fits:
        assert wanted(Snapshot(document), "none", Wishes(power_w=watts))
    else:
        with pytest.raises(CannotTune, match=f"{watts} W is outside of what .* takes: 301 to 599 W"):
            wanted(Snapshot(document), "none", Wishes(power_w=watts))


WANTS = "/etc/systemd/system/multi-user.target.wants/gpuctl-tune.service"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({}, []),
        ({"/etc/gpuctl/tune.json": '{"settings": [{"name": "a"}]}'}, []),  # placed, and not started at boot
        ({"/etc/gpuctl/tune.json": '{"settings": [{"name": "a"}]}', WANTS: {"error": "ENOENT"}}, []),
        ({"/etc/gpuctl/tune.json": {"error": "ENOENT"}, WANTS: "[Unit]"}, []),
        ({"/etc/gpuctl/tune.json": "not json", WANTS: "[Unit]"}, []),
        ({"/etc/gpuctl/tune.json": '{"settings": 7}', WANTS: "[Unit]"}, []),
        ({"/etc/gpuctl/tune.json": '{"settings": [{"name": "a"}]}', WANTS: "[Unit]"}, ["a"]),
    ],
)
def test_what_is_set_again_at_each_boot_is_seen(files, names):
    assert [job["name"] for job in tuning.kept(Snapshot({"files": files}))] == names


def test_what_is_rendered_for_the_boot_is_what_is_seen_again():
    settings = wanted(KPRO6, "latency", Wishes(max_read_request=512, no_acs_redirect=True))
    placed = {file.path: file.text for file in render.tune([setting.as_job() for setting in settings], "")}
    seen = tuning.kept(Snapshot({"files": {**placed, WANTS: placed[WANTS.replace("/multi-user.target.wants", "")]}}))
    assert all(setting.as_job() in seen for setting in settings)


@pytest.mark.parametrize("driver", ["vfio-pci", "mlx5_vfio_pci", "nvgrace-gpu-vfio-pci"])
def test_access_control_stays_where_any_driver_of_vfio_has_a_device(driver):
    document = json.loads(json.dumps(DOCUMENT))
    document["pci"]["devices"]["0000:c4:00.0"]["driver"] = driver
    with pytest.raises(CannotTune, match=r"0000:c4:00\.0 is for virtual machines"):
        wanted(Snapshot(document), "none", Wishes(no_acs_redirect=True))


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_no_setting_is_changed_unasked(tmp_path, words, monkeypatch):
    """Also not by --json, which looks as if it only showed them."""
    setting = next(one for one in wanted(KPRO6, "none", Wishes(max_read_request=256)) if not one.well)
    monkeypatch.setattr("gpuctl.cli.tune._seen", lambda *_: ((setting,), ()))
    monkeypatch.setattr("gpuctl.deploy.tune", lambda *_, **__: pytest.fail("it was changed"))
    (tmp_path / "hosts.yml").write_text("all: {hosts: {box: {ansible_connection: local}}}\n")
    done = CliRunner().invoke(tune.command, ["-i", str(tmp_path), "-t", "box", *words], standalone_mode=False)
    assert isinstance(done.exception, click.UsageError)
    assert "nobody is there; --yes says yes" in done.exception.message
