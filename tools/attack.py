"""Attack the library: damaged and hostile files, kills, full disks, two writers, wrong arguments.

    python tools/attack.py                           # every case, about half an hour on two cores
    python tools/attack.py data_files --share 0.1    # a tenth of one attack
    python tools/attack.py --out benchmarks/results/attack.json

Each case runs in a process of its own with limits on memory and time. The table says how many were tried and
what came of them; the exit code is 1 where a case ends in a wrong answer, a traceback, a crash or a hang.
docs/reliability.md has the table of the last full run. Needs Linux.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tools.attacks.harness import DEFECTS, NAMED, Result, is_unexpected, table  # noqa: E402 - needs the path above

ATTACKS = ("api_abuse", "saved_models", "data_files", "writers", "write_errors", "kills")
"""Modules of tools/attacks, each with ``attack(seed, share, folder)``."""


def run(name: str, seed: int, share: float, *, seconds: float = float("inf")) -> Iterator[Result]:
    """Yield the results of one attack; no further case begins after ``seconds``."""
    import torch

    torch.set_num_threads(1)  # a fork does not have the threads that torch has started
    random.seed(seed)
    end = time.monotonic() + seconds
    module = importlib.import_module(f"tools.attacks.{name}")
    with tempfile.TemporaryDirectory(prefix=f"attack-{name}-") as folder:
        os.chmod(folder, 0o755)  # readers without permissions of ours come in
        for result in module.attack(seed, share, Path(folder)):
            yield result
            if time.monotonic() > end:
                raise SystemExit(f"{name} takes more than {seconds:g} s: give more --minutes, or a --share")


def main() -> None:
    """Run the attacks that are named, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--share", type=float, default=1.0, help="share of the cases; default: 1, all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="limit for each attack; default: 30")
    parser.add_argument(
        "--out", type=Path, help="JSON file of the results; attacks in it that are not run now are kept"
    )
    chosen = parser.parse_args()
    unknown = set(chosen.attacks) - set(ATTACKS)
    if unknown or not 0 < chosen.share <= 1:
        parser.error(f"no attack {sorted(unknown)}" if unknown else "--share lies between 0 and 1")
    every: list[Result] = []
    for name in chosen.attacks or ATTACKS:
        begun, mine = time.monotonic(), []
        for result in run(name, chosen.seed, chosen.share, seconds=60 * chosen.minutes):
            mine.append(result)
            if result.outcome in DEFECTS:
                print(f"{result.outcome}: {result.attack}, {result.case}: {result.detail}", flush=True)
        seconds = round(time.monotonic() - begun, 1)
        print(f"{name}: {seconds:.0f} s", file=sys.stderr, flush=True)
        if chosen.out is not None:
            _write(chosen.out, name, mine, seed=chosen.seed, share=chosen.share, seconds=seconds)
        every += mine
    print(table(every))
    for (attacked, outcome), reason in NAMED.items():
        print(f"{attacked}, {outcome}: {reason}")
    sys.exit(any(map(is_unexpected, every)))


def _write(file: Path, name: str, results: list[Result], **about: Any) -> None:
    import torch

    from hetsngp.files import write_json

    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    about["commit"] = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    about |= {"python": sys.version.split()[0], "torch": torch.__version__, "table": counts(results)}
    about["defects"] = [result.to_dict() for result in results if is_unexpected(result)]
    named = [result for result in results if result.outcome in DEFECTS and not is_unexpected(result)]
    about["named"] = [result.to_dict() for result in named]
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found[name] = about
    write_json(file, {each: found[each] for each in ATTACKS if each in found})


def counts(results: list[Result]) -> dict[str, dict[str, int]]:
    """Number of each outcome, for each kind of case."""
    found: dict[str, dict[str, int]] = {}
    for result in results:
        outcomes = found.setdefault(result.attack, {})
        outcomes[result.outcome] = outcomes.get(result.outcome, 0) + 1
    return found


if __name__ == "__main__":
    main()
