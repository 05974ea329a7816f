"""What is found out about boards, power modes, clocks and GPUs, on made-up machines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_trees import H200, FakeNvml, jetson, write_tree
from edge_spec import nvml
from edge_spec.bench.conditions import Conditions, describe
from edge_spec.device_facts import DeviceFacts, power_mode, read_device_facts
from edge_spec.nvml import Gpu, Gpus, read_gpus


def nothing() -> None:
    """A machine without NVIDIA's library."""


def test_a_machine_that_tells_nothing_is_no_error(tmp_path: Path) -> None:
    facts = read_device_facts(tmp_path, nothing)
    assert facts == DeviceFacts()
    assert describe(facts) == ""


def test_a_missing_library_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_NAME", "libthere-is-no-such-thing.so.1")
    assert nvml.find_library() is None
    assert read_gpus() == Gpus()


def test_a_jetson_tells_its_board_its_power_mode_and_its_clocks(tmp_path: Path) -> None:
    facts = read_device_facts(jetson(tmp_path), nothing)
    assert facts.board == "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super"
    assert facts.power_mode == "MAXN_SUPER (2)"
    assert facts.governor == "schedutil"
    assert (facts.gpu_mhz, facts.memory_mhz, facts.cpu_mhz) == (1020, 3199, 1728)
    assert describe(facts).startswith("NVIDIA Jetson Orin Nano")
    assert "power mode MAXN_SUPER (2)" in describe(facts) and "GPU 1020 MHz" in describe(facts)


@pytest.mark.parametrize("device", ["17000000.ga10b", "gpu.0", "gpu-gpc-0", "17000000.gv11b"])
def test_the_clock_of_the_gpu_is_found_under_all_its_names(device: str, tmp_path: Path) -> None:
    write_tree(tmp_path, {f"sys/class/devfreq/{device}/cur_freq": "1300500000\n"})
    assert read_device_facts(tmp_path, nothing).gpu_mhz == 1300


@pytest.mark.parametrize(
    ("status", "conf", "expected"),
    [
        ("pmode:0000\n", "< POWER_MODEL ID=0 NAME=MAXN >", "MAXN (0)"),
        ("pmode:0003\n", "< POWER_MODEL ID=0 NAME=MAXN >", "3"),
        ("pmode:0003\n", "", "3"),
        ("something else\n", "", "something else"),
        ("", "", None),
    ],
)
def test_a_power_mode_has_its_name_where_there_is_one(
    status: str, conf: str, expected: str | None, tmp_path: Path
) -> None:
    assert power_mode(write_tree(tmp_path, {"var/lib/nvpmodel/status": status, "etc/nvpmodel.conf": conf})) == expected


@given(content=st.text(max_size=200))
@settings(max_examples=30, deadline=None)
def test_whatever_the_files_hold_is_no_error(content: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = jetson(tmp_path_factory.mktemp("tree"))
    for file in list(root.rglob("*")):
        if file.is_file():
            file.write_bytes(content.encode())
    describe(read_device_facts(root, nothing))


@pytest.mark.parametrize(
    "content", ["9" * 400, "9" * 5000, "pmode:" + "9" * 5000, "pmode:2\n" * 9, "\x1b[2JJetson", "²"]
)
def test_numbers_without_an_end_and_signs_for_a_terminal_are_left_out(content: str, tmp_path: Path) -> None:
    root = jetson(tmp_path)
    for file in list(root.rglob("*")):
        if file.is_file() and file.name != "nvpmodel.conf":
            file.write_bytes(content.encode())
    facts = read_device_facts(root, nothing)
    assert facts.cpu_mhz is facts.gpu_mhz is facts.memory_mhz is None
    assert str(facts.board).isprintable() and str(facts.power_mode).isprintable()


def test_gpus_tell_their_limits_clocks_and_what_holds_them_down() -> None:
    library = FakeNvml([H200, {**H200, "reasons": 0x4 | 0x20 | 0x1}])
    found = read_gpus(lambda: library)
    assert found.driver == "550.54.15"
    assert found.gpus[0] == Gpu("NVIDIA H200", 700, 1980, 3201, 41, ())
    assert found.gpus[1].throttled_by == ("power cap", "heat")
    assert library.begun == library.ended == 1


@pytest.mark.parametrize("part", sorted(H200))
@pytest.mark.parametrize("how", ["no such function", "not supported"])
def test_what_a_gpu_does_not_tell_is_none_and_the_rest_is_there(part: str, how: str) -> None:
    facts: dict[str, Any] = dict(H200)
    if how == "not supported":
        facts[part] = None
    else:
        del facts[part]
    (gpu,) = read_gpus(lambda: FakeNvml([facts])).gpus
    told = {
        "name": gpu.name,
        "milliwatts": gpu.power_limit_watts,
        "clocks": gpu.sm_mhz,
        "celsius": gpu.celsius,
        "reasons": gpu.throttled_by or None,
    }
    assert told.pop(part) is None
    told.pop("reasons", None)
    assert None not in told.values()


def test_a_library_without_a_driver_is_left_alone() -> None:
    library = FakeNvml([H200], begins=False)
    assert read_gpus(lambda: library) == Gpus()
    assert library.ended == 0


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, edge_spec.device_facts as f; f.read_device_facts(); print('numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


# Before and after


def at(**facts: Any) -> DeviceFacts:
    return DeviceFacts(**{"power_mode": "MAXN (0)", "cpu_mhz": 1728, "gpu_mhz": 1020, **facts})


def test_a_machine_that_stays_as_it_is_gives_no_warning() -> None:
    resting = at(gpu_mhz=306)
    assert Conditions(resting, at(), at(gpu_mhz=1000)).warnings() == []
    assert Conditions(DeviceFacts(), DeviceFacts(), DeviceFacts()).warnings() == []


def test_a_clock_that_falls_under_the_load_is_told() -> None:
    (warning,) = Conditions(at(), at(), at(gpu_mhz=612)).warnings()
    assert "GPU clock fell from 1020 to 612 MHz" in warning


def test_another_power_mode_is_told_and_what_to_do() -> None:
    (warning,) = Conditions(at(), at(), at(power_mode="15W (1)")).warnings()
    assert "power mode changed from MAXN (0) to 15W (1)" in warning and "measure again" in warning


def test_a_power_limit_that_changed_and_a_throttled_gpu_are_told() -> None:
    before, after = Gpu("H200", 700, 1980, 3201), Gpu("H200", 500, 1400, 3201, 84, ("power cap",))
    warnings = Conditions(at(gpus=(before,)), at(gpus=(before,)), at(gpus=(after,))).warnings()
    assert any("power limit of H200 changed from 700 W to 500 W" in warning for warning in warnings)
    assert any("SM (GPU 0) clock fell from 1980 to 1400 MHz" in warning for warning in warnings)
    assert any("held down by power cap" in warning for warning in warnings)
