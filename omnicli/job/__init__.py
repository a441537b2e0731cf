"""A run from end to end: where the parts are put together."""

from omnicli.job.plan import plan_job
from omnicli.job.run import run_job

__all__ = ["plan_job", "run_job"]
