"""--report_to: the real packages, offline, hold the figures of a run afterwards. Skipped where one is not installed."""

import pytest

from tests.helpers import log_of

SHORT = dict(max_steps=4, eval_interval=2, eval_steps=1, checkpoint_interval=0, sample_interval=0)


def expected(run) -> dict[tuple[str, int], float]:
    """{(name, step): value} of what the log says of losses and rates."""
    found = {("train/loss", r["step"]): r["loss"] for r in log_of(run, "train")}
    found |= {("train/lr", r["step"]): r["lr"] for r in log_of(run, "train")}
    found |= {("val/bpb", r["step"]): r["bpb"] for r in log_of(run, "val")}
    assert len(found) == 10
    return found


def test_tensorboard_holds_the_figures(train, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(**SHORT, report_to="tensorboard").returncode == 0
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    held = {(tag, e.step): e.value for tag in events.Tags()["scalars"] for e in events.Scalars(tag)}
    for key, value in expected(tmp_path / "run").items():
        assert held[key] == pytest.approx(value, rel=1e-6), key
