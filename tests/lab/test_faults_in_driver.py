"""Faults of a node's NVIDIA driver, as its guests see them."""

import pytest

from tests.lab.cuda import cuinit, opened
from tests.lab.faults import devices, driver
from tests.lab.faults.boot import reboot

pytestmark = pytest.mark.lab


@pytest.fixture
def well(lab_to_break):
    """Well before each test."""
    yield lab_to_break
    reboot(lab_to_break, "kpro7")
    assert cuinit(lab_to_break, "ct210") == 0


def test_a_module_that_is_unloaded_answers_nobody(well):
    lab = well
    driver.unload_module(lab, "kpro7", "nvidia_uvm")
    assert "nvidia-uvm" not in lab.check("ct210", ["cat", "/proc/devices"])
    assert opened(lab, "ct210").startswith("-1 ENXIO")
    driver.unload_module(lab, "kpro7", "nvidia_uvm", undo=True)
    assert int(opened(lab, "ct210")) > 2


def test_a_lost_gpu_is_in_the_kernel_log_and_gone_from_nvidia_smi_until_the_next_boot(well):
    lab = well
    driver.lose_gpu(lab, "kpro7", 3)
    assert "GPU has fallen off the bus" in lab.check("kpro7", ["dmesg"])
    assert lab.run("ct210", ["nvidia-smi"]).returncode != 0


def test_libraries_of_another_version_do_not_fit_the_module(well):
    lab = well
    driver.mismatch_libraries(lab, "ct210", "595.84")
    done = lab.run("ct210", ["nvidia-smi"])
    assert "Driver/library version mismatch" in done.stdout + done.stderr
    assert cuinit(lab, "ct210") == 803
    assert cuinit(lab, "kpro7") == 0
    driver.mismatch_libraries(lab, "ct210", "595.71.05")


def test_an_updated_driver_leaves_the_guests_libraries_behind_at_the_next_boot(well):
    lab = well
    driver.update_driver(lab, "kpro7", "595.84")
    reboot(lab, "kpro7")
    assert cuinit(lab, "kpro7") == 0
    assert cuinit(lab, "ct210") == 803
    driver.update_driver(lab, "kpro7", "595.71.05")


def test_a_broken_uvm_is_an_input_output_error_everywhere_until_it_is_reloaded(well):
    lab = well
    driver.break_uvm(lab, "kpro7")
    assert opened(lab, "ct210").startswith("-1 EIO")
    assert opened(lab, "kpro7").startswith("-1 EIO")


def test_cuinit_answers_a_code_that_no_device_explains(well):
    lab = well
    driver.answer_cuinit(lab, "kpro7", 802)
    assert cuinit(lab, "ct210") == 802
    assert int(opened(lab, "ct210")) > 2


def test_an_empty_file_in_place_of_the_node_gives_999_too_where_root_cannot_make_another_node(well):
    lab = well
    devices.file_for_node(lab, "ct201", "/dev/nvidia-uvm")
    assert int(opened(lab, "ct201")) > 2
    assert cuinit(lab, "ct201") == 999
