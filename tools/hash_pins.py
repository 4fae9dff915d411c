"""Hashes of the pinned packages: write them, and check an installation against them.

    python tools/hash_pins.py write --also torch-2.13.0+cpu-….whl > requirements-hashed.txt
    python tools/hash_pins.py check REPORT

``write`` prints every pin of constraints.txt with the SHA-256 of each file that the index of pip's
configuration, or ``--index``, has of it; ``--also`` adds a wheel from another index, such as PyTorch's own
builds for the CPU. Run it whenever constraints.txt changes. ``check`` reads what ``pip install --report
REPORT`` wrote, and fails where a file was installed that is not one of these; ``make setup`` calls it with
the Python that made .venv, before anything in .venv is run, and removes .venv where it fails.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HASHES = ROOT / "requirements-hashed.txt"
HEADER = """\
# The pins of constraints.txt with the SHA-256 of every file of them; written by tools/hash_pins.py.
#
# `make setup` checks what it installed against these. To have pip refuse any other file by itself:
#
#     pip install --no-deps --require-hashes -r requirements-hashed.txt
#     pip install --no-deps --no-build-isolation -e .
#
# A CUDA build of torch needs packages that are not listed: install torch first, from an index that you trust.
"""
LINK = re.compile(r'href="([^"]+)#sha256=([0-9a-f]{64})"')


def normalized(name: str) -> str:
    """Name of a package as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def is_of_version(file: str, name: str, version: str) -> bool:
    """Whether a file name on the index is a wheel or a source archive of this version."""
    stem = file.removesuffix(".tar.gz").removesuffix(".zip")
    if file.endswith(".whl"):
        parts = file.split("-")
        return normalized(parts[0]) == normalized(name) and parts[1] == version
    return stem != file and normalized(stem) == normalized(f"{name}-{version}")


def index_of_pip() -> str:
    """Address of the index that pip is configured to use."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    found = (
        os.environ.get("PIP_INDEX_URL")
        or subprocess.run(command, capture_output=True, text=True).stdout.strip()
    )
    if not found:
        raise SystemExit("pip has no index in its configuration: give --index, the address of its simple API")
    return found


def hashes_on_index(index: str, name: str, version: str) -> list[str]:
    """SHA-256 of every file of the version."""
    with urllib.request.urlopen(f"{index.rstrip('/')}/{normalized(name)}/", timeout=60) as page:
        text = page.read().decode()
    found = {
        digest
        for link, digest in LINK.findall(text)
        if is_of_version(
            urllib.parse.unquote(html.unescape(link)).rpartition("/")[2].partition("#")[0], name, version
        )
    }
    if not found:
        raise SystemExit(f"the index has no file of {name} {version}")
    return sorted(found)


def write(index: str, also: list[Path]) -> None:
    """Print the file of hashes."""
    others = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in also}
    print(HEADER, end="")
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        name, version = line.split("==")
        digests = hashes_on_index(index, name, version)
        digests += [
            d for file, d in others.items() if normalized(file.name.split("-")[0]) == normalized(name)
        ]
        print(f"{line} \\\n    " + " \\\n    ".join(f"--hash=sha256:{digest}" for digest in digests))


def listed_hashes(text: str) -> dict[str, set[str]]:
    """SHA-256 of the files of each package, by its name on the index, from requirements-hashed.txt."""
    found: dict[str, set[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            found[normalized(line.partition("==")[0])] = set(re.findall("sha256:([0-9a-f]{64})", line))
    return found


def check(report: dict[str, Any], listed: dict[str, set[str]]) -> tuple[list[str], list[str]]:
    """Packages of the report whose file is another than those listed, and packages that are not listed."""
    other, unlisted = [], []
    for item in report["install"]:
        archive = item["download_info"].get("archive_info")
        name = normalized(item["metadata"]["name"])
        if archive is None:  # the checkout itself
            continue
        if name not in listed:
            unlisted.append(name)
        elif archive.get("hashes", {}).get("sha256") not in listed[name]:
            other.append(f"{name} from {item['download_info']['url']}")
    return other, unlisted


def main() -> None:
    """Run one of both commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="print requirements-hashed.txt")
    writing.add_argument("--also", type=Path, nargs="*", default=[], help="wheels from another index")
    writing.add_argument("--index", help="address of an index; default: the one of pip's configuration")
    checking = commands.add_parser("check", help="check what pip installed")
    checking.add_argument("report", type=Path, help="report of pip install --report")
    chosen = parser.parse_args()
    if chosen.command == "write":
        write(chosen.index or index_of_pip(), chosen.also)
        return
    listed = listed_hashes(HASHES.read_text(encoding="utf-8"))
    other, unlisted = check(json.loads(chosen.report.read_text(encoding="utf-8")), listed)
    if unlisted:
        print(f"installed without a pin, so not checked: {', '.join(sorted(unlisted))}")
    if other:
        sys.exit(
            "these files are not those that were tested, by their SHA-256: "
            f"{'; '.join(other)}. Remove .venv, and check the index that pip uses"
        )


if __name__ == "__main__":
    main()
