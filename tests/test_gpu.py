"""`bench.py gpu`: the order of its parts, their limits, the report, and what it says of a machine."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import bench
from benchmarks import gpu, kernels, machine
from benchmarks.report import markdown, targets, what_is_wrong
from run.runtime import Runtime
from tests.helpers import assert_user_error, run_inline

ROW = "import json, sys; json.dump([dict(name='x', rate=2.0, unit='tokens/s')], open(sys.argv[1], 'w'))"
FAIL = "import sys; print('some words'); sys.exit('error: there is no data')"
SEEN = "import json; assert list(json.load(open('report.json'))['parts']) == ['first']; " + ROW
HANG = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); "
    "open('pid', 'w').write(str(p.pid)); print('measuring', flush=True); time.sleep(300)"
)


@pytest.fixture
def door(capsys, monkeypatch, tmp_path):
    """Run `bench.py gpu` with parts that are lines of Python: door(dict(first=ROW), "--minutes", 3)."""

    def run(parts: dict, *words, limit=100):
        made = {name: gpu.Part("", limit, f"part {name}") for name in parts}
        monkeypatch.setattr(gpu, "PARTS", made)
        monkeypatch.setattr(gpu, "PATIENCE", 1)
        monkeypatch.setattr(gpu, "command", lambda name, _, file: [sys.executable, "-c", parts[name], str(file)])
        words = ["gpu", "--device", "cpu", "--out", tmp_path / "gpu", *words]
        return run_inline(bench.main, words, capsys, monkeypatch)

    return run


def report_of(tmp_path: Path) -> tuple[dict, str]:
    return json.loads((tmp_path / "gpu" / "report.json").read_text()), (tmp_path / "gpu" / "report.md").read_text()


def test_the_report_is_there_after_every_part(door, tmp_path):
    assert door(dict(first=ROW, second=SEEN)).returncode == 0
    report, text = report_of(tmp_path)
    assert [part["error"] for part in report["parts"].values()] == ["", ""]
    assert text.index("part first") < text.index("part second") and "2.0 tokens/s" in text
    assert sorted(path.name for path in (tmp_path / "gpu").iterdir()) == ["log.txt", "report.json", "report.md"]


def test_a_part_that_fails_is_named_and_the_others_go_on(door, tmp_path):
    assert door(dict(first=FAIL, second=ROW)).returncode == 0
    report, text = report_of(tmp_path)
    assert report["parts"]["first"]["error"] == "there is no data" and report["parts"]["second"]["rows"]
    assert text.count("there is no data") >= 2 and "some words" in text  # among what is wrong, and at its place


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_part_that_takes_too_long_is_ended_with_all_its_processes(door, tmp_path):
    assert door(dict(first=HANG, second=ROW), limit=1).returncode == 0
    report, text = report_of(tmp_path)
    assert "1 s" in report["parts"]["first"]["error"] and "measuring" in text and report["parts"]["second"]["rows"]
    assert not running(int((tmp_path / "gpu" / "pid").read_text()))


def test_what_no_time_is_left_for_is_named_with_its_command(door, tmp_path, monkeypatch):
    clock = itertools.count(step=20.0)  # a minute is three looks at it: one before the parts, then one for each
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert door(dict(first=ROW, second=ROW, third=ROW), "--minutes", "1").returncode == 0
    report, text = report_of(tmp_path)
    assert list(report["parts"]) == ["first"] and report["left_out"] == ["second", "third"]
    assert "--only second third" in text


def test_a_part_alone_is_added_to_the_report_in_its_place(door, tmp_path):
    both = dict(first=ROW, second=FAIL)
    assert door(both, "--only", "second").returncode == 0
    assert door(both, "--only", "first").returncode == 0
    assert [(name, bool(part["error"])) for name, part in report_of(tmp_path)[0]["parts"].items()] == [
        ("first", False),
        ("second", True),
    ]


@pytest.mark.parametrize("content", ["", "[]", '{"parts": 3}', '{"parts": {"first": []}}', "[" * 100_000])
def test_another_file_of_that_name_is_refused(door, tmp_path, content):
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "report.json").write_text(content)
    assert_user_error(door(dict(first=ROW), "--only", "first"), "report.json")


def test_wrong_usage_is_one_line(door, capsys, monkeypatch):
    assert_user_error(door(dict(first=ROW), "--only", "last"), "last", "first")
    assert_user_error(run_inline(bench.main, ["gpu", "--device", "cpu"], capsys, monkeypatch), "--out")


def test_a_part_measures_in_a_process_of_its_own(tmp_path, monkeypatch):
    """Here its main function alone: the attention of the CPU against the formula."""
    words = gpu.command("attention", bench.Config(size="tiny", device="cpu"), tmp_path / "rows.json")
    monkeypatch.setattr(sys, "argv", ["gpu", *words[3:]])
    gpu.main()
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["ok"] and "attention" in row["name"]
    assert words[:2] == [sys.executable, "-c"] and compile(words[2], "code", "exec")


@pytest.mark.parametrize(
    "name, kind",
    [("triton_red_fused__log_softmax_native_layer_norm_12", "reductions"),
     ("triton_poi_fused__scaled_dot_product_flash_attention_view_3", "elementwise"),
     ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
     ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", "attention"),
     ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "products"), ("triton_tem_fused_mm_7", "products"),
     ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", "optimizer"),
     ("Memcpy DtoD (Device -> Device)", "copies"), ("void at::native::vectorized_elementwise_kernel<4>", "others")],
)  # fmt: skip
def test_kernels_are_told_apart_by_their_names(name, kind):
    assert kind in kernels.kind(name)


# ----------------------------------------------------------------------------------------------------------- the report


def parts(**rows) -> dict:
    return {name: dict(rows=found, seconds=1.0, error="", said="") for name, found in rows.items()}


def training(name: str, rate: float, memory: float, mfu: float = 0.4) -> dict:
    return dict(name=name, rate=rate, unit="tokens/s", ratio=1.0, memory=memory, mfu=mfu, batch_size=64)


def test_targets_are_compared_with_what_was_reached():
    train = [training("plain, eager, bf16", 100.0, 60.0), training("plain with torch.compile, bf16", 150.0, 50.0),
             training("this project", 170.0, 30.0, 0.52)]  # fmt: skip
    memory = [dict(name="gpt2-xl", micro_batch_size=8, memory=1)]
    rows = targets(parts(train=train, memory=memory), "NVIDIA H100 80GB HBM3")
    assert [row["there"] for row in rows] == ["yes", "no", "yes", "yes", "yes"]
    rows = targets(parts(train=train), "NVIDIA H200")
    assert [row["there"] for row in rows] == ["yes", "no", "yes", "no"]  # 57% there
    assert targets(parts(), "NVIDIA H100") == []


def test_what_is_wrong_comes_first():
    found = parts(
        machine=[dict(name="disk", found="3 GB free", wrong="too little"), dict(name="GPU", found="fine", wrong="")],
        numerics=[dict(name="20 steps", found="0.1 apart", ok=False), dict(name="others", found="", ok=True)],
    )
    found["lora"] = dict(rows=[], seconds=2.0, error="there is no peft", said="Traceback\nthere is no peft")
    wrong = what_is_wrong(found)
    assert len(wrong) == 3 and "too little" in wrong[0] and "0.1 apart" in wrong[1] and "no peft" in wrong[2]
    about = dict(device="a GPU", torch="2", python="3")
    report = dict(machine=about, device="cuda", size="", parts=found, left_out=[])
    text = markdown(report, dict.fromkeys(found, "a part"))
    assert text.index("too little") < text.index("a part")


# ---------------------------------------------------------------------------------------------------------- the machine


def test_a_machine_is_looked_at(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "WRITTEN", 2**20)
    monkeypatch.setattr(machine, "NEEDED_GB", 10**9)
    rows = {row["name"]: row for row in machine.run(None, Runtime.setup("cpu", "float32"))}
    assert "free" in rows["disk"]["wrong"] and rows["host"]["found"] and not list(tmp_path.iterdir())
    assert "WRONG" in capsys.readouterr().out


SOUND = "570.86.15, 700.00, 700.00, 1980, 1980, 31, Default, 0"


@pytest.mark.parametrize(
    "line, wrong",
    [(SOUND, ""), (SOUND.replace("700.00,", "350.00,", 1), "capped"), (SOUND.replace(" 31,", " 84,"), "hot"),
     (SOUND.replace("Default", "Exclusive_Process"), "one process"), (SOUND[:-1] + "7", "memory fails"),
     ("570.86.15, [N/A], [N/A], 1980, 1980, 31, Default, [N/A]", "")],
)  # fmt: skip
def test_what_a_gpu_says_of_itself_is_judged(monkeypatch, line, wrong):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(machine.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=line + "\n"))
    found = [text for _, _, text in machine.gpu_state(SimpleNamespace(device="cuda")) if text]
    assert (wrong in found[0] and len(found) == 1) if wrong else not found


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), subprocess.CalledProcessError(9, "nvidia-smi")])
def test_a_container_without_nvidia_smi_is_none_the_worse(monkeypatch, error):
    def run(*args, **kwargs):
        raise error

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(machine.subprocess, "run", run)
    ((_, found, wrong),) = machine.gpu_state(SimpleNamespace(device="cuda"))
    assert "nvidia-smi" in found and not wrong


@pytest.mark.parametrize("free, taken", [(79, False), (75, False), (60, True)])
def test_memory_that_somebody_else_holds_is_noticed(monkeypatch, free, taken):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    ((_, found, wrong),) = machine.gpu_memory(SimpleNamespace(device="cuda"))
    assert bool(wrong) is taken and f"{free}.0" in found


def test_a_speed_is_held_against_the_peak_of_its_name():
    assert machine.against(700, 989, "TFLOP/s", "capped") == ("700 TFLOP/s, 71% of 989", "")
    assert "capped" in machine.against(300, 989, "TFLOP/s", "capped")[1]
    assert machine.against(300, None, "TFLOP/s", "capped")[1] == ""  # of a card that is in no table
    assert machine.look_up("NVIDIA H200", machine.PEAK_GB) == 4800
    assert machine.look_up("NVIDIA A100-SXM4-40GB", machine.PEAK_GB) == 1555
    assert machine.look_up("NVIDIA A100-SXM4-80GB", machine.PEAK_GB) == 2039
