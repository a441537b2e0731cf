"""A token at random, by its probability."""

from collections.abc import Callable

from torch import Tensor

from omnicli.errors import UserError
from omnicli.operators.sampling import inverse_cdf, keep_top_k, keep_top_p, penalise
from omnicli.scheduling.policy import Policy


class Sample:
    """One uniform number per row and choice, turned into a token by the inverse of the CDF."""

    def __init__(
        self, temperature: float, top_k: int = 0, top_p: float = 1.0, penalty: float = 1.0
    ) -> None:
        if temperature <= 0:
            raise UserError(f"the temperature is {temperature}", hint="above 0, or use greedy")
        if top_k < 0 or not 0 < top_p <= 1 or penalty <= 0:
            raise UserError(
                f"top_k {top_k}, top_p {top_p}, repetition_penalty {penalty}",
                hint="top_k from 0 (all), top_p above 0 and at most 1, the penalty above 0",
            )
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.penalty = penalty

    def choose(
        self, logits: Tensor, draw: Callable[[], Tensor], seen: Tensor | None = None
    ) -> Tensor:
        """See `Policy`; the order is that of transformers."""
        if seen is not None:
            logits = penalise(logits, seen, self.penalty)
        logits = logits / self.temperature
        if self.top_k:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        return inverse_cdf(logits, draw())


def build(
    temperature: float = 1.0,
    top_k: float = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
) -> Policy:
    """The policy; `temperature` above 0, `top_k` 0 for all tokens."""
    return Sample(temperature, int(top_k), top_p, repetition_penalty)
