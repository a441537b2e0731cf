"""A token at random, by its probability."""

from collections.abc import Callable

from torch import Tensor

from omnicli.errors import UserError
from omnicli.operators.sampling import inverse_cdf
from omnicli.scheduling.policy import Policy


class Sample:
    """One uniform number per row and choice, turned into a token by the inverse of the CDF."""

    def __init__(self, temperature: float) -> None:
        if temperature <= 0:
            raise UserError(f"the temperature is {temperature}", hint="above 0, or use greedy")
        self.temperature = temperature

    def choose(self, logits: Tensor, draw: Callable[[], Tensor]) -> Tensor:
        """See `Policy`."""
        return inverse_cdf(logits / self.temperature, draw())


def build(temperature: float = 1.0) -> Policy:
    """The policy; `temperature` above 0."""
    return Sample(temperature)
