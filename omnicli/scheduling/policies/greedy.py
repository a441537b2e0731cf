"""The likeliest token. Deterministic: the policy of all golden tests."""

from collections.abc import Callable

from torch import Tensor

from omnicli.operators.sampling import penalise
from omnicli.scheduling.policy import Policy


class Greedy:
    """No chance."""

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def choose(
        self, logits: Tensor, draw: Callable[[], Tensor], seen: Tensor | None = None
    ) -> Tensor:
        """See `Policy`."""
        if seen is not None:
            logits = penalise(logits, seen, self.penalty)
        return logits.argmax(dim=-1)


def build(repetition_penalty: float = 1.0) -> Policy:
    """The policy."""
    return Greedy(repetition_penalty)
