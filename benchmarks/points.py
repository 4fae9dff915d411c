"""Error of E softmax(u) by the number of points of the factor, and plain Monte Carlo points for each of ours.

    PYTHONPATH=src python benchmarks/points.py --out benchmarks/results     # a minute on two cores

Errors: the largest of a class, root mean square over 8 examples and the randomisations, against 2^12 points.
"plain": number of points of plain Monte Carlo, over all coordinates, for each of ours at equal squared error,
both at 128 points.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor

from hetsngp.functional import link
from hetsngp.types import UtilityNormal

# Standard deviation of the logits from the factor, and from the diagonal.
NOISE = {"mild": (0.5, 0.5), "wide factor": (4.0, 1.0), "wide diagonal": (1.0, 6.0), "wide both": (5.0, 5.0)}
SIZES = ((3, 6), (10, 6), (100, 6), (1000, 15))
ROWS, POINTS, REFERENCE = 8, (32, 64, 128, 256, 512), 2**12
COMPARED = 128


def utility(classes: int, rank: int, in_factor: float, in_diagonal: float) -> UtilityNormal:
    g = torch.Generator().manual_seed(11)
    factor = in_factor / math.sqrt(rank) * torch.randn(ROWS, classes, rank, generator=g)
    mean = 2 * torch.randn(ROWS, classes, generator=g)
    return UtilityNormal(mean, torch.full_like(mean, in_diagonal**2), factor)


def errors(u: UtilityNormal, truth: Tensor, sampler: str, points: int, repeats: int) -> Tensor:
    """Errors (repeats, B, K) of independent randomisations."""
    each = [
        link.softmax_probs(u, num_samples=points, sampler=sampler, seed=seed)[0] for seed in range(repeats)
    ]
    return (torch.stack(each) - truth).double()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for points.json")
    parser.add_argument("--repeats", type=int, default=5, help="independent randomisations of each estimate")
    args = parser.parse_args()
    rows = []
    print("| K | noise |" + "".join(f" {count} |" for count in POINTS) + " plain |\n" + "|---" * 8 + "|")
    for classes, rank in SIZES:
        for name, widths in NOISE.items():
            u = utility(classes, rank, *widths)
            truth = link.softmax_probs(u, num_samples=REFERENCE, seed=10_000)[0]
            ours = {count: errors(u, truth, "sobol", count, args.repeats) for count in POINTS}
            plain = errors(u, truth, "mc", COMPARED, args.repeats)
            ratio = float(plain.square().sum() / ours[COMPARED].square().sum())
            found = {str(n): float(e.abs().amax(-1).square().mean().sqrt()) for n, e in ours.items()}
            rows.append({"classes": classes, "rank": rank, "noise": name, "errors": found, "plain": ratio})
            cells = "".join(f" {error:.4f} |" for error in found.values())
            print(f"| {classes:,} | {name} |{cells} {ratio:.0f} |", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "points.json").write_text(json.dumps({"repeats": args.repeats, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
