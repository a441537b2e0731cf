"""The base set, alone and in company; see `case_run.check`."""

import shutil

import pytest
from case_process import Processes
from case_run import Omni, check, put_base
from case_sounds import DEMO, padded, speech, wav

SAY_BASE = (
    *("Yes.", "The train leaves at nine.", "Please bring the blue folder to the second floor."),
    *("Good morning, this is Anna.", "We need two bags of rice.", "The window is open."),
    *("Call me back on Friday.", "It rains again today."),
)


def pytest_configure(config):
    config.addinivalue_line("markers", "case(id): the field case that a test is about")


@pytest.fixture(scope="session")
def omni(model_cache):
    """Run a command; returns its exit code and what it wrote."""
    return Omni(model_cache)


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Eight short recordings that are known to be good."""
    folder = tmp_path_factory.mktemp("base-set")
    shutil.copy(DEMO / "yes-please.flac", folder)
    for name, source, begin_s, end_s in (
        ("april", "site-visit", 0.0, 1.6),
        ("bread", "shopping-list", 5.4, 7.5),
        ("empty", "empty-room", 0.0, 2.0),
        ("hola", "station-spanish", 1.6, 3.7),
        ("store", "shopping-list", 0.0, 1.85),
    ):
        wav(folder / f"{name}.flac", speech(source, begin_s, end_s))
    wav(folder / "quiet.flac", 0.2 * speech("yes-please"))
    wav(folder / "tail.flac", padded(speech("yes-please"), 1.6))
    assert len(list(folder.iterdir())) == 8
    return folder


@pytest.fixture(scope="session")
def ok():
    """Two seconds: "Yes, please." """
    return padded(speech("yes-please"), 2.0)


@pytest.fixture(scope="session")
def alone(tmp_path_factory, base):
    """A folder with nothing but the base set in it."""
    return put_base(base, tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="session")
def solo(omni, alone, tmp_path_factory):
    """The base set's transcripts when it is alone."""
    out = tmp_path_factory.mktemp("solo") / "out"
    case = check(omni, None, "transcribe", alone, "-o", out, count=8, code=0)
    statuses = [line["status"] for line in case.lines.values()]
    assert statuses.count("ok") == 7
    assert statuses.count("empty") == 1
    assert case.text("base/yes-please.flac") == "yes please"
    return case


@pytest.fixture(scope="session")
def say_base():
    """Lines to say that are known to be good."""
    return [{"id": f"base-{n}", "text": text} for n, text in enumerate(SAY_BASE)]


@pytest.fixture
def inbox(base, tmp_path):
    """A new folder with the base set in it."""
    return put_base(base, tmp_path / "in")


@pytest.fixture
def out(tmp_path):
    """Where a test's run goes."""
    return tmp_path / "out"


@pytest.fixture
def process(model_cache, tmp_path):
    """Start a command in a process of its own."""
    processes = Processes(model_cache, tmp_path)
    yield processes
    processes.close()
