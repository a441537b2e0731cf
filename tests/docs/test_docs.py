"""What the documents say is true: they name everything, and their commands exist."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnicli import plugins
from omnicli.cli import app
from omnicli.io import audio

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
README = (ROOT / "README.md").read_text(encoding="utf-8")
KINDS = ("family", "handover", "loop", "policy", "writer")


def test_the_reference_of_the_command_line_is_up_to_date():
    """Made with: python -m typer omnicli.cli utils docs --name omni > docs/cli.md"""
    command = [sys.executable, "-m", "typer", "omnicli.cli", "utils", "docs", "--name", "omni"]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert PAGES["cli.md"].strip() == made.stdout.strip()


@pytest.mark.parametrize("name", [name for kind in KINDS for name in plugins.names(kind)])
def test_every_plugin_is_on_the_map(name):
    assert f"`{name}`" in PAGES["architecture.md"]


def test_every_module_is_on_the_map():
    page = PAGES["architecture.md"]
    missing = [
        path.name
        for path in (ROOT / "omnicli").rglob("*.py")
        if not path.name.startswith("_") and path.name not in page
        if not any(f"{parent.name}/" in page for parent in path.parents if parent.name != "omnicli")
    ]
    assert not missing


def commands(text):
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    return [part.strip() for line in lines for part in line.split("&&") if "omni " in part]


@pytest.mark.parametrize("command", commands(README))
def test_every_command_of_the_readme_has_its_options(command):
    words = shlex.split(command)[1:]
    depth = 2 if words[0] in ("manifest", "models") else 1
    shown = CliRunner().invoke(app, [*words[:depth], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    for word in words[depth:]:
        if word.startswith("-"):
            assert word in shown.output, command


def test_the_demo_is_as_the_readme_says():
    lines = (ROOT / "manifests" / "demo.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 10
    assert all((ROOT / "manifests" / row["audio_filepath"]).is_file() for row in rows)
    assert "the ten demo recordings" in README


def test_links_between_documents_lead_somewhere():
    for name, text in {"README.md": README, **PAGES}.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (folder / link).exists(), f"{name}: {link}"


def test_every_error_code_and_warning_is_explained():
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "omnicli").rglob("*.py"))
    codes = re.findall(r'(?:RequestError\(\s*|Failure\(\s*code=)"([a-z_]+)"', source)
    assert len(set(codes)) > 10
    warnings = re.findall(r"^    ([a-z_]+)  +\S", audio.__doc__ or "", flags=re.MULTILINE)
    warnings += ["suspect_text", "suspect_translation", "low_coverage", "summary_guard"]
    warnings += ["condensed", "cut_by_max_new_tokens", "voice_cannot_speak", "duration_claim"]
    told = set(re.findall(r"^\| `([a-z_]+)`", PAGES["results.md"], flags=re.MULTILINE))
    assert {*codes, *warnings} <= told
