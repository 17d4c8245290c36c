"""--report_to: the trackers get what the log has. None is installed: for each, a module that writes down its calls."""

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tests.helpers import log_of, spoil_gradients, steps_of

SHORT = dict(max_steps=4, eval_interval=2, eval_steps=1, checkpoint_interval=2, sample_interval=2)


def expected(run: Path) -> dict[tuple[str, int], float]:
    """{(name, step): value}"""
    train = ("loss", "lr", "grad_norm", "tokens", "tokens_per_sec", "memory_gib", "skipped_steps")
    found = {(f"train/{key}", r["step"]): r[key] for r in log_of(run, "train") for key in train}
    found |= {(f"val/{key}", r["step"]): r[key] for r in log_of(run, "val") for key in ("loss", "bpb")}
    assert len(found) == 4 * 7 + 2 * 2
    return found


def fail(*args, **options):
    raise RuntimeError("NO SERVER")


class Tracker(types.ModuleType):
    """A stand-in for wandb and trackio."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # accelerate asks for it

    def init(self, **options):
        self.options = options
        self.held = {}

    def log(self, numbers: dict, step: int):
        self.held |= {(name, step): value for name, value in numbers.items()}

    def finish(self):
        self.ended_with = len(self.held)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_the_constants_and_every_number_and_a_resume_continues_its_run(
    train, run_dir, monkeypatch, name
):
    trackers = [Tracker(name), Tracker(name)]
    monkeypatch.setitem(sys.modules, name, trackers[0])
    train(**SHORT, report_to=name)
    assert expected(run_dir).items() <= trackers[0].held.items()
    assert trackers[0].ended_with == len(trackers[0].held)  # after the last number
    monkeypatch.setitem(sys.modules, name, trackers[1])
    train(**SHORT | dict(max_steps=5, resume=True), report_to=name)
    first, second = (tracker.options for tracker in trackers)
    assert (first["name"], first["config"]["n_embd"]) == ("run", 32)
    assert (first["resume"], second["resume"]) == ("never", "allow")
    if name == "wandb":
        assert first["id"] == second["id"]
        assert first["dir"] == str(run_dir)


def test_tensorboard_holds_the_figures(train, run_dir, monkeypatch):
    module = types.ModuleType("torch.utils.tensorboard")
    places = []
    held = {}

    class SummaryWriter:
        def __init__(self, place):
            places.append(place)

        def add_scalar(self, name, number, step):
            held[name, step] = number

        def close(self):
            places.append("closed")

    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    train(**SHORT, report_to="tensorboard")
    assert expected(run_dir).items() <= held.items()
    assert places == [str(run_dir), "closed"]


@pytest.mark.parametrize("name", ["log", "finish"])
def test_a_tracker_that_fails_ends_no_run(train, run_dir, monkeypatch, name):
    tracker = Tracker("wandb")
    setattr(tracker, name, fail)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    result = train(**SHORT, report_to="wandb")
    assert steps_of(run_dir)[-1] == 4
    assert (result.stdout + result.stderr).count("NO SERVER") == 1
    tracker.init = fail
    train.error("wandb", "NO SERVER", **SHORT, report_to="wandb", out="next")
    train(**SHORT, out="next")


def test_a_picture_that_fails_ends_no_run_and_hides_no_other_error(train, learning_curve, run_dir, monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    train(**SHORT)
    assert steps_of(run_dir)[-1] == 4
    spoil_gradients(monkeypatch, lambda step: True, float("nan"))
    train.error("2", "--resume", **SHORT | dict(max_bad_steps=2), overwrite=True)


def test_a_missing_tracker_says_what_to_install_before_anything_changes(train, tmp_path, monkeypatch):
    train(**SHORT)
    monkeypatch.setitem(sys.modules, "wandb", None)
    train.error("wandb", **SHORT, report_to="wandb", overwrite=True)
    assert steps_of(tmp_path / "run") == [2, 4]
    assert not (tmp_path / "run.1").exists()
