"""The likeliest token. Deterministic: the policy of all golden tests."""

from collections.abc import Callable

from torch import Tensor

from omnicli.scheduling.policy import Policy


class Greedy:
    """No options."""

    def choose(self, logits: Tensor, draw: Callable[[], Tensor]) -> Tensor:
        """See `Policy`."""
        return logits.argmax(dim=-1)


def build() -> Policy:
    """The policy."""
    return Greedy()
