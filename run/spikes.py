"""Detects loss spikes, for run/run.py to roll back. This file knows nothing of runs or checkpoints."""

import statistics
from collections import Counter, deque

from cli import UserError


class SpikeDetector:
    """A spike is PATIENCE steps in a row with a loss more than `threshold` above the median of the good steps. There is
    none before MIN_LOSSES losses, and none if the threshold is 0."""

    WINDOW = 100  # a median over so many steps moves slowly
    MIN_LOSSES = 20  # one over fewer is noise
    PATIENCE = 3  # odd batches come singly, spikes do not
    MAX_RETURNS = 3  # a spike that recurs so often, each time on other data, is not caused by the data

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.losses = deque(maxlen=self.WINDOW)  # of good steps
        self.high = 0  # steps in a row
        self.returns = Counter()  # to each checkpoint

    def median(self) -> float:
        return statistics.median(self.losses)

    def add(self, loss: float) -> bool:
        """Add the loss of a step; returns True for a spike."""
        known = self.threshold > 0 and len(self.losses) >= self.MIN_LOSSES
        if known and loss > self.median() + self.threshold:
            self.high += 1
        else:  # high losses stay out of the median, or it would follow them
            self.high = 0
            self.losses.append(loss)
        return self.high >= self.PATIENCE

    def accept(self) -> None:
        """Treat the high losses as normal from here on."""
        self.losses.clear()
        self.high = 0

    def count(self, checkpoint: str) -> None:
        """Count a rollback. Raises UserError after too many to the same checkpoint: other data does not help then."""
        self.returns[checkpoint] += 1
        if self.returns[checkpoint] > self.MAX_RETURNS:
            raise UserError(
                f"the loss jumps again after {self.MAX_RETURNS} rollbacks to {checkpoint}, each with other data; "
                "lower --max_lr and --resume, or accept the jump with --spike_threshold 0"
            )

    def state_dict(self) -> dict:
        return dict(losses=list(self.losses), high=self.high)

    def load_state_dict(self, state: dict) -> None:
        self.losses = deque(map(float, state["losses"]), maxlen=self.WINDOW)
        self.high = int(state["high"])
