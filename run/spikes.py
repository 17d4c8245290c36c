"""Losses that jump: noticed here; run/directory.py goes back to a checkpoint. This file knows nothing of either."""

import statistics
from collections import Counter, deque

from cli import UserError


class SpikeDetector:
    """Notices a loss that has jumped: PATIENCE steps in a row, each more than `threshold` above the median of the good
    ones. Nothing is a spike before there are MIN_LOSSES losses, or with a threshold of 0."""

    # A median over 100 steps moves slowly, one over fewer than 20 says little. Odd batches come singly, spikes do not.
    # And what three rounds of other data do not cure is not in the data.
    WINDOW, MIN_LOSSES, PATIENCE, MAX_RETURNS = 100, 20, 3, 3

    def __init__(self, threshold: float):
        self.threshold = threshold
        self.losses: deque[float] = deque(maxlen=self.WINDOW)
        self.high = 0  # steps in a row
        self.returns: Counter[str] = Counter()  # to each checkpoint

    def median(self) -> float:
        return statistics.median(self.losses)

    def add(self, loss: float) -> bool:
        """Take note of a step's loss; True for a spike."""
        if 0 < self.threshold and self.MIN_LOSSES <= len(self.losses) and loss > self.median() + self.threshold:
            self.high += 1
        else:  # high losses stay out of the median, or it would follow them
            self.high = 0
            self.losses.append(loss)
        return self.high >= self.PATIENCE

    def accept(self) -> None:
        """Let the high losses be the normal ones from here on."""
        self.losses.clear()
        self.high = 0

    def count(self, checkpoint: str) -> None:
        """Raises UserError for one return too many to the same checkpoint: other data then does not help."""
        self.returns[checkpoint] += 1
        if self.returns[checkpoint] > self.MAX_RETURNS:
            what = f"the loss jumps again after {self.MAX_RETURNS} returns to {checkpoint}, each with other data"
            raise UserError(f"{what}; lower --max_lr and --resume, or accept the jump with --spike_threshold 0")

    def state_dict(self) -> dict:
        return dict(losses=list(self.losses), high=self.high)

    def load_state_dict(self, state: dict) -> None:
        self.losses = deque(map(float, state["losses"]), maxlen=self.WINDOW)
        self.high = int(state["high"])
