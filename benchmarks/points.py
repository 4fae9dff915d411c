"""Number of plain Monte Carlo points for each of ours, at equal error of E softmax(u).

    PYTHONPATH=src python benchmarks/points.py --out benchmarks/results     # 10 s on two cores

"plain net": the same Sobol and Latin-hypercube points without the K−1 contrasts (K ≤ 32) and without the
Taylor control (mild noise, K > 32), to show the effect of those two. Ratios of squared errors, 4 examples,
128 points.
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
ROWS, POINTS = 4, 128


def utility(classes: int, rank: int, in_factor: float, in_diagonal: float) -> UtilityNormal:
    g = torch.Generator().manual_seed(11)
    factor = in_factor / math.sqrt(rank) * torch.randn(ROWS, classes, rank, generator=g)
    mean = 2 * torch.randn(ROWS, classes, generator=g)
    return UtilityNormal(mean, torch.full_like(mean, in_diagonal**2), factor)


def squared_error(u: UtilityNormal, sampler: str, repeats: int) -> float:
    """Variance of the estimate over independent randomisations, summed over rows and classes."""
    draws: list[Tensor] = []
    for seed in range(repeats):
        draws.append(link.softmax_probs(u, num_samples=POINTS, sampler=sampler, seed=seed)[0].double())
    return float(torch.stack(draws).var(0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder for points.json")
    parser.add_argument(
        "--repeats", type=int, default=100, help="independent randomisations of each estimate"
    )
    args = parser.parse_args()
    contrasts, mild = link.CONTRAST_CLASSES, link.MILD_VARIANCE
    rows = []
    print("| K | noise | ours | plain net |\n|---|---|---|---|")
    for classes, rank in SIZES:
        for name, widths in NOISE.items():
            u = utility(classes, rank, *widths)
            plain, ours = squared_error(u, "mc", args.repeats), squared_error(u, "sobol", args.repeats)
            link.CONTRAST_CLASSES, link.MILD_VARIANCE = 2, -1.0
            net = squared_error(u, "sobol", args.repeats)
            link.CONTRAST_CLASSES, link.MILD_VARIANCE = contrasts, mild
            rows.append({"classes": classes, "noise": name, "ours": plain / ours, "plain net": plain / net})
            print(f"| {classes} | {name} | {plain / ours:.1f} | {plain / net:.1f} |", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "points.json").write_text(json.dumps({"repeats": args.repeats, "ratios": rows}, indent=1))


if __name__ == "__main__":
    main()
