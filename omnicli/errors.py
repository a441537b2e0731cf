"""Every exception that omnicli raises on purpose.

    OmniError
    ├── UserError      the command, manifest, model or place is wrong   exit 2, nothing ran
    │   └── BusyError       another run holds the output folder              exit 75
    ├── RunError       the run cannot go on (disk full, device lost)    exit 1
    ├── StoppedError    a signal asked for an orderly end                exit 128 + signal
    ├── TimeUpError     the time that the run was given is over          exit 0, the rest waits
    └── RequestError   one request failed; the others go on             exit 3 at the end

Anything else that escapes is a bug and keeps its traceback.
"""


class OmniError(Exception):
    """Base of all deliberate errors; `hint` says what the reader can do about it."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UserError(OmniError):
    """The input is wrong in a way that only the person at the keyboard can mend."""

    exit_code = 2


class BusyError(UserError):
    """Another run works in the same output folder."""

    exit_code = 75


class RunError(OmniError):
    """The run as a whole cannot go on; what is finished stays finished."""

    exit_code = 1


class StoppedError(OmniError):
    """SIGINT, SIGTERM or SIGHUP: the batch in hand is finished, the rest waits for the next run."""

    def __init__(self, signal_number: int) -> None:
        super().__init__("interrupted", hint="the same command goes on where this run stopped")
        self.exit_code = 128 + signal_number


class TimeUpError(OmniError):
    """The time that the run was given is over; what is left waits for the next run."""

    exit_code = 0

    def __init__(self) -> None:
        super().__init__("the time is up: what is left waits for the next run")


class RequestError(OmniError):
    """One request cannot be done. `code` is stable and documented in docs/results.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
