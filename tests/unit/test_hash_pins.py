"""The pinned packages have hashes, and an installation of other files is noticed."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.scripts import load_script

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "hash_pins.py"


@pytest.fixture(scope="module")
def pins() -> ModuleType:
    return load_script("tools/hash_pins.py")


def versions(text: str) -> set[str]:
    return {line.split(" ")[0] for line in text.splitlines() if "==" in line and not line.startswith("#")}


def test_both_files_have_the_same_pins_and_each_has_hashes(pins: ModuleType) -> None:
    hashed = pins.HASHES.read_text()
    assert versions(hashed) == versions((ROOT / "constraints.txt").read_text())
    listed = pins.listed_hashes(hashed)
    assert len(listed) == len(versions(hashed))
    assert all(listed.values())


def report_of(name: str, sha256: str) -> dict[str, Any]:
    """Report of pip with one package and the checkout itself."""
    archive = {"url": f"https://index/{name}.whl", "archive_info": {"hashes": {"sha256": sha256}}}
    checkout = {"url": "file:///checkout", "dir_info": {"editable": True}}
    return {
        "install": [
            {"metadata": {"name": name}, "download_info": archive},
            {"metadata": {"name": "hetsngp"}, "download_info": checkout},
        ]
    }


def test_another_file_is_refused_and_the_listed_one_is_not(pins: ModuleType, tmp_path: Path) -> None:
    good = sorted(pins.listed_hashes(pins.HASHES.read_text())["jinja2"])[0]
    report = tmp_path / "report.json"

    def run(name: str, sha256: str) -> subprocess.CompletedProcess[str]:
        report.write_text(json.dumps(report_of(name, sha256)))
        return subprocess.run([sys.executable, TOOL, "check", report], capture_output=True, text=True)

    assert run("Jinja2", good).returncode == 0
    assert run("Jinja2", good).stdout == ""
    refused = run("Jinja2", "0" * 64)
    assert refused.returncode == 1
    assert "jinja2 from https://index/Jinja2.whl" in refused.stderr
    unlisted = run("nvidia-cublas", "0" * 64)
    assert (unlisted.returncode, "nvidia-cublas" in unlisted.stdout) == (0, True)


@pytest.mark.parametrize(
    ("file", "is_it"),
    [
        ("ast_serialize-0.13.1-cp39-abi3-win32.whl", True),
        ("ast_serialize-0.13.1.tar.gz", True),
        ("ast_serialize-0.13.10.tar.gz", False),
        ("ast_serialize-0.13.1-cp39-abi3-win32.whl.metadata", False),
        ("ast_serialize_more-0.13.1.tar.gz", False),
    ],
)
def test_files_of_a_version_are_told_by_their_names(pins: ModuleType, file: str, is_it: bool) -> None:
    assert pins.is_of_version(file, "ast-serialize", "0.13.1") is is_it
