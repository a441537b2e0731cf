"""Every field case has a test."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES = HERE.parents[2] / "shared" / "field-cases.md"


def test_every_case_has_a_test():
    if not CASES.exists():
        pytest.skip("there is no list of cases here")
    listed = set(re.findall(r"^\| ([A-Z]{2}-\d\d) \|", CASES.read_text("utf-8"), re.MULTILINE))
    tests = "".join(path.read_text("utf-8") for path in HERE.glob("test_case_*.py"))
    tested = set(re.findall(r'mark\.case\("([A-Z]{2}-\d\d)"\)', tests))
    assert len(listed) > 40
    assert tested == listed
