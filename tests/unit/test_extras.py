"""Every extra that a message, a docstring or the documentation names is one that pip can install."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
    "optional-dependencies"
]
NAMED = re.compile(r"(?:hetsngp|'\.)\[([\w, -]+)\]")


def packages(extra: str) -> set[str]:
    """Names of the packages an extra installs, through extras of our own too."""
    found: set[str] = set()
    for requirement in EXTRAS[extra]:
        own = NAMED.fullmatch(requirement)
        if own:
            found |= {name for part in own[1].split(",") for name in packages(part)}
        else:
            found.add(re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0])
    return found


def test_every_extra_that_is_named_exists() -> None:
    texts = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    texts += [ROOT / "pyproject.toml", ROOT / "constraints.txt", ROOT / "CONTRIBUTING.md"]
    named: dict[str, set[str]] = {}
    for file in texts:
        for match in NAMED.finditer(file.read_text()):
            for extra in match[1].split(","):
                named.setdefault(extra.strip(), set()).add(str(file.relative_to(ROOT)))
    assert {"cli", "eval", "sklearn", "tables", "train", "vision"} <= set(named)
    assert {extra: files for extra, files in named.items() if extra not in EXTRAS} == {}


def test_extras_hold_what_their_users_import() -> None:
    assert packages("eval") == {"torchmetrics", "matplotlib", "rich", "jinja2"}
    assert packages("cli") == packages("eval") | {"typer"}
    users = set(EXTRAS) - {"dev", "weights", "all"}
    assert packages("all") == {name for extra in users for name in packages(extra)}
