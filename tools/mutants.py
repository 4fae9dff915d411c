"""Mutation testing: do the tests of a package notice when its code is wrong?

    python tools/mutants.py list                    # draw mutants from src, by seed, into tools/mutants.json
    python tools/mutants.py run --out after.json    # change the code for each, run the tests of its package
    python tools/mutants.py compare --before before.json --out after.json

A mutant is named by function and operator (``softmax_nll: Sub -> Add: 2 * y - 1``), not by file and line, so
that the same mutant is found again after the code has moved. Each runs in a copy of the checkout, with
``pytest -x``. A mutant that no longer exists in the code is reported as "gone".
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SEED = 21
COUNTS = {"functional": 19, "nn": 16, "posterior": 10, "training": 15}
"""Package → mutants drawn from it."""
TESTS = {
    "functional": ["tests/unit/functional", "tests/contract/test_limits.py"],
    "nn": ["tests/unit/nn", "tests/contract/test_limits.py"],
    "posterior": ["tests/unit/posterior", "tests/contract/test_limits.py"],
    "training": ["tests/unit/training", "tests/integration/test_resume.py"],
}
TIMEOUT = 600
BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.MatMult: None}
COMPARE = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its qualified name; functions inside functions belong to the outer one."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        prefix, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                waiting.append((f"{prefix}{child.name}.", child))
            elif isinstance(child, ast.FunctionDef):
                yield f"{prefix}{child.name}", child


def sites(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, str]]:
    """Every place to change: node, operator and new source. Messages and types are left alone."""
    skipped: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise | ast.Assert | ast.AnnAssign | ast.arguments | ast.JoinedStr):
            skipped |= {id(inner) for inner in ast.walk(node)}
    for statement in function.body:
        for node in ast.walk(statement):
            if id(node) in skipped:
                continue
            yield from ((node, operator, new) for operator, new in changes(node))


def changes(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The ways to change one node: (operator, source)."""
    if isinstance(node, ast.BinOp) and BINARY.get(type(node.op)) is not None:
        other = BINARY[type(node.op)]
        new = ast.BinOp(node.left, other(), node.right)
        yield f"{type(node.op).__name__} -> {other.__name__}", ast.unparse(new)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARE[type(node.ops[0])]
        new = ast.Compare(node.left, [other()], node.comparators)
        yield f"{type(node.ops[0]).__name__} -> {other.__name__}", ast.unparse(new)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        yield f"drop {type(node.op).__name__}", ast.unparse(node.operand)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield f"{type(node.op).__name__} -> {other.__name__}", ast.unparse(ast.BoolOp(other(), node.values))
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant + 1", repr(node.value + 1)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "drop call", "pass"


def all_mutants(package: Path) -> list[dict[str, str]]:
    """Every mutant of a package, each name once: where a name stands twice, the first place is meant."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        for name, function in functions(ast.parse(file.read_text(encoding="utf-8"))):
            if name.rpartition(".")[2] in ("__repr__", "__str__", "__post_init__"):
                continue
            for node, operator, new in sites(function):
                old = ast.unparse(node)
                if len(old) < 100:
                    mutant = {"function": name, "operator": operator, "old": old, "new": new}
                    found.setdefault(f"{name}: {operator}: {old}", mutant)
    return [{"name": name, "package": package.name, **found[name]} for name in sorted(found)]


def draw() -> list[dict[str, str]]:
    """The sample, by :data:`SEED`: at most two of one function."""
    chosen = []
    for package, count in COUNTS.items():
        pool = all_mutants(ROOT / "src" / "hetsngp" / package)
        random.Random(f"{SEED} {package}").shuffle(pool)
        taken: dict[str, int] = {}
        for mutant in pool:
            if sum(taken.values()) < count and taken.get(mutant["function"], 0) < 2:
                taken[mutant["function"]] = taken.get(mutant["function"], 0) + 1
                chosen.append(mutant)
    return chosen


def mutate(source: Path, mutant: dict[str, Any]) -> bool:
    """Change the code below ``source``; False where the mutant is not found in it.

    ``before`` holds the function and the expression as they were before a renaming.
    """
    return _mutate(source, mutant) or ("before" in mutant and _mutate(source, {**mutant, **mutant["before"]}))


def earlier_name(mutant: dict[str, Any]) -> str:
    """The name of a mutant before a renaming."""
    before = {**mutant, **mutant.get("before", {})}
    return f"{before['function']}: {before['operator']}: {before['old']}"


def _mutate(source: Path, mutant: dict[str, Any]) -> bool:
    for file in sorted(source.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if mutant["function"].rpartition(".")[2] not in text:
            continue
        for name, function in functions(ast.parse(text)):
            if name != mutant["function"]:
                continue
            for node, operator, new in sites(function):
                if (operator, ast.unparse(node), new) == (mutant["operator"], mutant["old"], mutant["new"]):
                    file.write_text(replaced(text, node, new), encoding="utf-8")
                    return True
    return False


def replaced(text: str, node: ast.AST, new: str) -> str:
    """The source with ``new`` in place of ``node``; in brackets, so that precedence stays."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]  # columns count bytes
    first, last = node.lineno - 1, node.end_lineno - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    new = new if new == "pass" else f"({new})"
    return b"".join([*lines[:first], head + new.encode() + tail, *lines[last + 1 :]]).decode()


def run_one(mutant: dict[str, str], root: Path, python: str) -> dict[str, object]:
    """Killed, survived or gone, and by which test."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "checkout"
        ignore = shutil.ignore_patterns(".*", "__pycache__", "out", "runs", "*.png", "*.jpg")
        shutil.copytree(root, copy, ignore=ignore)
        result = {"name": mutant["name"], "package": mutant["package"]}
        if not mutate(copy / "src" / "hetsngp", mutant):
            return {**result, "state": "gone"}
        env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "-W", "ignore"]
        command = [python, "-m", "pytest", *options, *TESTS[mutant["package"]]]
        try:
            run = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT)
            code, out = run.returncode, run.stdout
        except subprocess.TimeoutExpired:
            code, out = 1, "FAILED timeout"
    failed = [line for line in out.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code not in (0, 1, 2):
        raise RuntimeError(f"{mutant['name']}: pytest ended with {code}\n{out[-2000:]}")
    state = "survived" if code == 0 else "killed"
    seconds = round(time.perf_counter() - begun, 1)
    return {**result, "state": state, "by": failed[0][:160] if failed else "", "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["list", "run", "compare"])
    parser.add_argument("--mutants", type=Path, default=Path(__file__).with_name("mutants.json"))
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to test")
    parser.add_argument("--out", type=Path, help="results; those that are there are kept")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--before", type=Path, help="with compare: the earlier results")
    given = parser.parse_args()
    if given.command == "list":
        given.mutants.write_text(json.dumps(draw(), indent=1) + "\n", encoding="utf-8")
        return
    if given.command == "compare":
        earlier = {m["name"]: earlier_name(m) for m in json.loads(given.mutants.read_text())}
        before, after = (
            {earlier.get(r["name"], r["name"]): r["state"] for r in json.loads(f.read_text())}
            for f in (given.before, given.out)
        )
        lost = [name for name, state in before.items() if state == "killed" and after.get(name) != "killed"]
        for title, states in (("before", before), ("after", after)):
            counts = {s: list(states.values()).count(s) for s in ("killed", "survived", "gone")}
            print(title, counts)
        print("killed before and not after:", lost or "none")
        sys.exit(bool(lost))
    mutants = json.loads(given.mutants.read_text(encoding="utf-8"))
    done = json.loads(given.out.read_text()) if given.out.exists() else []
    known = {result["name"] for result in done}
    with ThreadPoolExecutor(given.jobs) as pool:
        todo = [mutant for mutant in mutants if mutant["name"] not in known]
        for result in pool.map(lambda m: run_one(m, given.root, sys.executable), todo):
            done.append(result)
            print(result, flush=True)
            given.out.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    killed = sum(result["state"] == "killed" for result in done)
    print(f"{killed} of {len(done)} killed")


if __name__ == "__main__":
    main()
