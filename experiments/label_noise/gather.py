"""Put the results of this folder's commands together: results.json, the tables of README.md, label_noise.png.

    python experiments/label_noise/gather.py --results out/label_noise/results

``detect.json``, ``tables.json`` and ``rounds.json`` are read where detect.py, tables.py and rounds.py wrote
them. What a ``results.json``
has and the folder lacks is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rounds
import study
from scipy.special import softmax
from scipy.stats import rankdata
from scipy.stats import t as student

from hetsngp.data.datasets.human_labels import load_cifar10h
from hetsngp.files import write_text

HERE = Path(__file__).parent
RESAMPLES = 500
NOISES = {"worse": "worse", "random1": "random1", "aggre": "aggregate", "cifar100": "CIFAR-100"}
METHODS = {
    "deterministic": "linear softmax",
    "heteroscedastic": "heteroscedastic",
    "sngp": "sngp",
    "hetsngp": "hetsngp",
}
CHOSEN = "direct, amplitude by given labels"
KEPT = ("detect", "tables", "rounds")
"""Results in files of their own."""


# --- numbers ----------------------------------------------------------------------------------------------


def mean(values: Iterable[float], digits: int = 3) -> str:
    """Mean ± standard error."""
    values = list(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return f"{short(statistics.mean(values), digits)} ± {short(error, digits)}"


def short(value: float, digits: int = 3) -> str:
    text = f"{value:.{digits}f}"
    return re.sub(r"^(-?)0\.", r"\1.", text).replace("-", "−")


def interval(differences: Sequence[float], digits: int = 4) -> str:
    """Mean and 95 % interval of paired differences, by Student's t."""
    n = len(differences)
    half = student.ppf(0.975, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    centre = statistics.mean(differences)
    ends = f"{short(centre - half, digits)} to {short(centre + half, digits)}"
    return f"{short(centre, digits)} ({ends})"


WAYS = ("deterministic, direct", "hetsngp, direct", "hetsngp, corrected")


def people(results: Path) -> dict[str, Any]:
    """Spearman correlations with the entropy of votes: of everything that was tried as data uncertainty; and
    95 % bootstrap intervals of differences.
    """
    votes = load_cifar10h().double()
    share = votes / votes.sum(1, keepdim=True)
    entropy = -(share * share.clamp_min(1e-12).log()).sum(1).numpy()
    rng = np.random.default_rng(0)
    samples = [rng.integers(len(entropy), size=len(entropy)) for _ in range(RESAMPLES)]
    found: dict[str, Any] = {"images without a vote against the label": float((entropy == 0).mean())}
    for labels in ("aggre", "random1"):
        arrays = []
        for seed in study.SEEDS:
            file = results / f"uncertainty-{labels}-{seed}.npz"
            if not file.is_file():
                return {}
            with np.load(file) as content:
                arrays.append({name: content[name] for name in content.files})
        for way in WAYS:
            tried = [candidates(a, way) for a in arrays]
            found[f"{labels}, {way}: tried"] = {
                name: statistics.mean(correlation(t[name], entropy) for t in tried) for name in tried[0]
            } | {"mean over three heads": correlation(sum(t["data uncertainty"] for t in tried), entropy)}
            found[f"{labels}, {way}: confidence"] = [float(-t["1 − largest"].mean() + 1) for t in tried]
        for way in WAYS[1:]:
            data, model = f"{way}: data_uncertainty", f"{way}: model_uncertainty"
            for name, one, other in (
                ("data − model", data, model),
                ("data − linear's entropy", data, "deterministic, direct: total_uncertainty"),
            ):
                draws = [
                    statistics.mean(
                        correlation(a[one][rows], entropy[rows]) - correlation(a[other][rows], entropy[rows])
                        for a in arrays
                    )
                    for rows in samples
                ]
                low, high = np.quantile(draws, [0.025, 0.975])
                found[f"{labels}, {way}: {name}"] = [float(np.mean(draws)), float(low), float(high)]
    return found


def candidates(arrays: dict[str, np.ndarray], way: str) -> dict[str, np.ndarray]:
    """What could stand for data uncertainty."""
    logits = arrays[f"{way}: probs"].astype(np.float64)
    probs = softmax(logits, axis=1)
    ordered = np.sort(probs, axis=1)
    total = entropy_of(probs)
    without_noise = entropy_of(softmax(arrays[f"{way}: clean_probs"].astype(np.float64), axis=1))
    return {
        "data uncertainty": arrays[f"{way}: data_uncertainty"],
        "entropy of clean_probs": without_noise,
        "what the noise adds to the entropy": total - without_noise,
        "1 − largest": 1 - ordered[:, -1],
        "margin": ordered[:, -2] - ordered[:, -1],
        "half the temperature": entropy_of(softmax(2 * logits, axis=1)),
        "twice the temperature": entropy_of(softmax(logits / 2, axis=1)),
    }


def entropy_of(probs: np.ndarray) -> np.ndarray:
    return -(probs * np.log(np.maximum(probs, 1e-12))).sum(1)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, as Pearson's of the ranks; 0 where all values are equal but for rounding."""
    if np.ptp(a) < 1e-9:
        return 0.0
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


# --- tables -----------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def best(peer: dict[str, Any]) -> dict[str, float]:
    return peer["scores"][peer["best score"]]


def ranking_table(found: dict[str, Any]) -> str:
    rows = []
    for labels, title in NOISES.items():
        for probs, name in (("linear", "linear softmax, 5 folds"), ("gp", "GP, leave-one-out")):
            runs = [found["detect"][f"{labels}-{s}"][probs] for s in study.SEEDS]
            gains = [r["hetsngp"]["ap"] - best(r["cleanlab"])["ap"] for r in runs]
            rows.append(
                [
                    title,
                    name,
                    mean(best(r["cleanlab"])["auroc"] for r in runs),
                    mean(r["hetsngp"]["auroc"] for r in runs),
                    mean(best(r["cleanlab"])["ap"] for r in runs),
                    mean(r["hetsngp"]["ap"] for r in runs),
                    short(min(gains), 4),
                ]
            )
        runs = [found["detect"][f"{labels}-{s}"] for s in study.SEEDS]
        last = [r["rounds"][r["round"] - 1] for r in runs]
        rows.append(
            [
                title,
                "GP, corrected in rounds",
                "",
                mean(r["auroc"] for r in last),
                "",
                mean(r["ap"] for r in last),
                "",
            ]
        )
    head = ["labels", "probabilities", "AUROC, cleanlab", "AUROC, hetsngp", "AP, cleanlab", "AP, hetsngp"]
    return table([*head, "least gain in AP"], rows)


def flags_table(found: dict[str, Any]) -> str:
    rows = []
    for labels, title in NOISES.items():
        runs = [found["detect"][f"{labels}-{s}"]["gp"] for s in study.SEEDS]
        wrong = runs[0]["hetsngp"]["wrong"]
        for name, of in (
            ("cleanlab's best filter", lambda r: r["cleanlab"]["filters"][r["cleanlab"]["best filter"]]),
            ("hetsngp", lambda r: r["hetsngp"]),
        ):
            flags = [of(r) for r in runs]
            low = statistics.mean(r["hetsngp"]["interval"][0] for r in runs)
            high = statistics.mean(r["hetsngp"]["interval"][1] for r in runs)
            expected = statistics.mean(r["hetsngp"]["expected_wrong"] for r in runs)
            examples = len(study.sets.given_labels(labels))
            other = examples * (1 - statistics.mean(r["accuracy of given"] for r in runs))
            rows.append(
                [
                    title,
                    name,
                    f"{wrong:,}",
                    f"{expected:,.0f} ({low:,.0f} to {high:,.0f})" if name == "hetsngp" else "",
                    f"{other:,.0f}" if name == "hetsngp" else "",
                    f"{statistics.mean(f['flagged'] for f in flags):,.0f}",
                    *(mean(f[key] for f in flags) for key in ("precision", "recall", "f1")),
                ]
            )
    head = ["labels", "", "wrong", "expected", "another class predicted", "flagged"]
    head += ["precision", "recall", "F1"]
    return table(head, rows)


def sharpening_table(found: dict[str, Any]) -> str:
    rows = []
    for labels, title in NOISES.items():
        runs = [found["detect"][f"{labels}-{s}"] for s in study.SEEDS]
        chosen = [r["gp"]["hetsngp"] for r in runs]
        plain = [row for r in runs for row in r["sharpenings"] if row["sharpening"] == 1]
        hindsight = [max(r["sharpenings"], key=lambda row: row["ap"]) for r in runs]
        rows.append(
            [
                title,
                ", ".join(sorted({f"{r['sharpening']:.3g}" for r in chosen})),
                mean(r["ap"] for r in chosen),
                ", ".join(sorted({f"{r['sharpening']:.3g}" for r in hindsight})),
                mean(r["ap"] for r in hindsight),
                mean(r["ap"] for r in plain),
            ]
        )
    head = ["labels", "s chosen by given labels", "AP", "best s in hindsight", "AP", "AP without, s = 1"]
    return table(head, rows)


def heads_of(found: dict[str, Any], labels: str, method: str, way: str) -> list[dict[str, Any]]:
    runs = [found["heads"][f"{labels}-{s}-{method}"]["result"] for s in study.SEEDS]
    return [r[way] for r in runs]


def heads_table(found: dict[str, Any]) -> str:
    rows = []
    for labels in ("worse", "random1", "aggre"):
        for method, name in METHODS.items():
            for way in ("direct", CHOSEN, "corrected"):
                if way == CHOSEN and method not in study.GPS:
                    continue
                runs = heads_of(found, labels, method, way)
                values = [mean(r[key] for r in runs) for key in ("accuracy", "nll", "ece", "votes nll")]
                rows.append([NOISES[labels], name, way, *values])
    return table(["labels", "head", "trained", "accuracy", "NLL", "ECE", "NLL of votes"], rows)


def differences_table(found: dict[str, Any]) -> str:
    """Paired differences, seed by seed."""
    rows = []

    def add(title: str, labels: str, a: tuple[str, str], b: tuple[str, str]) -> None:
        pairs = list(zip(heads_of(found, labels, *a), heads_of(found, labels, *b), strict=True))
        values = [interval([x[key] - y[key] for x, y in pairs]) for key in ("accuracy", "nll", "ece")]
        rows.append([NOISES[labels], title, *values])

    for method, name in METHODS.items():
        add(f"{name}: corrected − direct", "worse", (method, "corrected"), (method, "direct"))
        if method in study.GPS:
            title = f"{name}: corrected − direct, amplitude by given labels"
            add(title, "worse", (method, "corrected"), (method, CHOSEN))
    for labels in ("worse", "random1", "aggre"):
        for method in ("deterministic", "heteroscedastic", "sngp"):
            title = f"corrected: hetsngp − {METHODS[method]}"
            add(title, labels, ("hetsngp", "corrected"), (method, "corrected"))
    return table(["labels", "difference", "accuracy", "NLL", "ECE"], rows)


def shared_table(found: dict[str, Any]) -> str:
    """Heads without a GP on worse: labels of their own folds and of sngp, by all seeds that there are."""
    rows = []
    for method in ("deterministic", "heteroscedastic"):
        own = [
            run["result"]
            for name, run in sorted(found["heads"].items())
            if name.startswith("worse-") and name.endswith(f"-{method}")
        ]
        theirs = [run["result"] for name, run in sorted(found["shared"].items())]
        for title, pairs in (
            ("own folds", [(r["corrected"], r["direct"]) for r in own]),
            ("sngp", [(r[f"{method}, corrected by sngp"], r[f"{method}, direct"]) for r in theirs]),
        ):
            values = [interval([x[key] - y[key] for x, y in pairs]) for key in ("accuracy", "nll", "ece")]
            gains = [x["accuracy"] - y["accuracy"] for x, y in pairs]
            errors = statistics.mean(gains) / (statistics.stdev(gains) / math.sqrt(len(gains)))
            accuracy = mean(x["accuracy"] for x, _ in pairs)
            rows.append([METHODS[method], title, str(len(pairs)), accuracy, *values, f"{errors:.1f}"])
    for method in ("deterministic", "heteroscedastic", "sngp"):
        pairs = [
            (run["result"]["hetsngp, corrected by sngp"], run["result"][f"{method}, corrected by sngp"])
            for run in found["shared"].values()
            if "hetsngp, corrected by sngp" in run["result"]
        ]
        values = [interval([x[key] - y[key] for x, y in pairs]) for key in ("accuracy", "nll", "ece")]
        accuracy = mean(x["accuracy"] for x, _ in pairs)
        rows.append([f"hetsngp − {METHODS[method]}", "sngp", str(len(pairs)), accuracy, *values, ""])
    head = ["head", "labels corrected by", "seeds", "accuracy", "difference: accuracy", "NLL", "ECE"]
    return table([*head, "gain in accuracy, standard errors"], rows)


def people_table(found: dict[str, Any]) -> str:
    rows = []
    for labels in ("aggre", "random1"):
        for way in ("deterministic, direct", "hetsngp, direct", "hetsngp, corrected"):
            runs = [found["uncertainty"][f"{labels}-{s}"]["result"][way] for s in study.SEEDS]
            keys = ["data_uncertainty", "model_uncertainty", "latent_variance"]
            keys += ["data_uncertainty given model_uncertainty", "model_uncertainty given data_uncertainty"]
            gp = way.startswith("hetsngp")
            values = [
                mean((r[key] for r in runs), 4) if gp or key == "data_uncertainty" else "–" for key in keys
            ]
            gain = found["people"].get(f"{labels}, {way}: data − model")
            rows.append([NOISES[labels], way.replace("deterministic", "linear softmax"), *values])
            rows[-1].append("–" if gain is None else f"{short(gain[1], 4)} to {short(gain[2], 4)}")
    head = ["labels", "head", "data", "model", "latent variance", "data, model held fixed"]
    return table([*head, "model, data held fixed", "data − model, 95 %"], rows)


def tried_table(found: dict[str, Any]) -> str:
    names = next(v for k, v in found["people"].items() if k.endswith(": tried"))
    head = [f"{NOISES[labels]}, {way}" for labels in ("aggre", "random1") for way in WAYS]
    rows = [
        [
            name,
            *(
                short(found["people"][f"{labels}, {way}: tried"][name])
                for labels in ("aggre", "random1")
                for way in WAYS
            ),
        ]
        for name in names
    ]
    return table(["", *(h.replace("deterministic", "linear") for h in head)], rows)


def folds_table(found: dict[str, Any]) -> str:
    rows = []
    for labels in ("worse", "random1", "aggre"):
        for way in ("leave-one-out", "5 folds", "10 folds"):
            runs = [found["folds"][f"{labels}-{s}"]["result"][way] for s in study.SEEDS]
            values = [mean((r[key] for r in runs), 4) for key in ("given nll", "true accuracy", "auroc")]
            same = "–" if way == "leave-one-out" else mean(r["Spearman with leave-one-out"] for r in runs)
            rows.append([NOISES[labels], way, *values, same])
    head = ["labels", "", "NLL of given labels", "accuracy on true labels", "AUROC of 1 − p(given)"]
    return table([*head, "rank correlation with leave-one-out"], rows)


def tables_table(found: dict[str, Any]) -> str:
    rows = []
    for name in ("digits", "breast_cancer", "wine"):
        for way, title in (
            ("estimator", "HetSNGPClassifier, 5 folds"),
            ("gp on columns", "GP on the columns, leave-one-out"),
            ("logistic regression", "logistic regression, 5 folds"),
        ):
            runs = [found["tables"][f"{name}-{s}"][way] for s in study.SEEDS]
            rows.append(
                [
                    name,
                    title,
                    mean(best(r["cleanlab"])["auroc"] for r in runs),
                    mean(r["hetsngp"]["auroc"] for r in runs),
                    mean(best(r["cleanlab"])["ap"] for r in runs),
                    mean(r["hetsngp"]["ap"] for r in runs),
                    *(mean((r["hetsngp"][key] for r in runs), 2) for key in ("precision", "recall")),
                ]
            )
    head = ["table", "probabilities", "AUROC, cleanlab", "AUROC, hetsngp", "AP, cleanlab", "AP, hetsngp"]
    return table([*head, "precision", "recall"], rows)


def ideas_table(found: dict[str, Any]) -> str:
    rows = []
    for idea in found["ideas"].values():
        rows.append(
            [
                idea["idea"],
                short(idea["given nll"], 4),
                short(idea["ap"], 4),
                f"{idea['seconds']:.0f} s",
            ]
        )
        for number, one in enumerate(idea.get("rounds", []), start=1):
            rows.append([f"– round {number}", "", short(one["ap"], 4), ""])
    for name, ap in found["detect"]["worse-0"]["mixtures"].items():
        rows.append([name, "", short(ap, 4), ""])
    return table(["probabilities", "NLL of given labels", "AP", "time, five processes side by side"], rows)


def rounds_table(found: dict[str, Any]) -> str:
    """Means over seeds and settings, and the largest loss by more than one round."""
    results, lines = found["rounds"]["results"], []
    random = rounds.RANDOM[1]
    for examples in rounds.SIZES:
        runs = [r for r in results if r["examples"] == examples and r["noise"] != random]
        one, three = ([r[f"{n} rounds"] for r in runs] for n in (1, 3))
        means = [
            short(statistics.mean(r[key] for r in way))
            for key in ("nll of targets", "accuracy", "nll")
            for way in (one, three)
        ]
        worst = max(b["nll"] - a["nll"] for a, b in zip(one, three, strict=True))
        lines.append([f"{examples:,}", *means, f"+{short(worst)}"])
    head = ["examples", "NLL of targets, one", "up to 3", "accuracy, one", "up to 3", "NLL, one", "up to 3"]
    learned_nothing = [r["3 rounds"] for r in results if r["noise"] == random]
    agree = max(r["agrees with given"] for r in learned_nothing)
    least = min(loss for r in learned_nothing for loss in r["losses"])
    text = (
        "Labels drawn at random, three classes: out-of-sample predictions agree with up to "
        f"{short(agree, 2)} of them, and the least NLL is {least:.3f} (log 3 = {math.log(3):.3f})."
    )
    return "\n".join([table([*head, "worst"], lines), "", *textwrap.wrap(text, 110)])


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "ranking": ranking_table,
    "flags": flags_table,
    "sharpening": sharpening_table,
    "heads": heads_table,
    "differences": differences_table,
    "shared": shared_table,
    "people": people_table,
    "tried": tried_table,
    "folds": folds_table,
    "tables": tables_table,
    "ideas": ideas_table,
    "rounds": rounds_table,
}


def fill(text: str, found: dict[str, Any]) -> str:
    """Replace what is between ``<!-- name -->`` and ``<!-- end -->``."""
    for name, make in TABLES.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        content = make(found)
        text, count = re.subn(
            pattern, lambda m, content=content: f"{m[1]}\n{content}\n\n{m[2]}", text, flags=re.S
        )
        if count != 1:
            raise ValueError(f"README.md has {count} places for the table {name}, not one: <!-- {name} -->")
    return text


# --- the figure -------------------------------------------------------------------------------------------


def draw(found: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    series = (
        ("cleanlab, linear softmax", "#b0b0b0", lambda r: best(r["linear"]["cleanlab"])["ap"]),
        ("cleanlab, GP", "#707070", lambda r: best(r["gp"]["cleanlab"])["ap"]),
        ("hetsngp, GP", "#1f77b4", lambda r: r["gp"]["hetsngp"]["ap"]),
    )
    for place, (name, colour, of) in enumerate(series):
        at = [i + 0.15 * (place - 1) for i in range(len(NOISES))]
        runs = [[of(found["detect"][f"{labels}-{s}"]) for s in study.SEEDS] for labels in NOISES]
        heights = [statistics.mean(r) for r in runs]
        left.plot(at, heights, "o", markersize=9, label=name, color=colour)
    left.set_xticks(range(len(NOISES)), list(NOISES.values()))
    left.grid(axis="y", alpha=0.3)
    left.set_ylabel("average precision of wrong labels")
    left.set_title("Wrong labels found")
    left.legend(fontsize=8, loc="upper right")

    for labels, colour in zip(NOISES, ("#d62728", "#ff7f0e", "#2ca02c", "#9467bd"), strict=True):
        rows = found["detect"][f"{labels}-0"]["sharpenings"]
        chosen = found["detect"][f"{labels}-0"]["gp"]["hetsngp"]
        middle.plot(
            [row["sharpening"] for row in rows],
            [row["ap"] for row in rows],
            color=colour,
            label=NOISES[labels],
        )
        middle.plot(chosen["sharpening"], chosen["ap"], "o", color=colour, markersize=8)
    middle.set_xscale("log", base=2)
    middle.set_xticks([0.5, 1, 2, 4], ["½", "1", "2", "4"])
    middle.set_xlabel("sharpening s (dot: chosen by the given labels)")
    middle.set_ylabel("average precision of wrong labels")
    middle.set_title("Sharpening, chosen without clean labels")
    middle.legend(fontsize=8, loc="lower right")

    colours = {"direct": "#b0b0b0", CHOSEN: "#707070", "corrected": "#1f77b4"}
    for place, method in enumerate(METHODS):
        ways = [way for way in colours if way != CHOSEN or method in study.GPS]
        for number, way in enumerate(ways):
            runs = [r["nll"] for r in heads_of(found, "worse", method, way)]
            at = place + 0.28 * (number - (len(ways) - 1) / 2)
            error = statistics.stdev(runs) / math.sqrt(len(runs))
            right.bar(at, statistics.mean(runs), 0.26, yerr=error, color=colours[way])
    patches = [Patch(color=colour, label=way.replace(", ", ",\n")) for way, colour in colours.items()]
    names = [name.replace(" ", "\n").replace("oscedastic", "o-\nscedastic") for name in METHODS.values()]
    right.set_xticks(range(len(METHODS)), names)
    right.set_ylabel("NLL on clean test labels")
    right.set_title("Heads trained on 40 % wrong labels")
    right.legend(handles=patches, fontsize=8, loc="upper left")
    right.set_ylim(0, 1.45)
    figure.savefig(path, dpi=130)


# --- the command ------------------------------------------------------------------------------------------


def collect(results: Path, found: dict[str, Any]) -> dict[str, Any]:
    for stage in ("heads", "shared", "folds", "uncertainty", "ideas"):
        files = sorted(results.glob(f"{stage}-*.json"))
        of_stage = {f.stem.removeprefix(f"{stage}-"): json.loads(f.read_text()) for f in files}
        found[stage] = found.get(stage, {}) | of_stage
    for name in KEPT:
        file = HERE / f"{name}.json"
        if file.is_file():
            found[name] = json.loads(file.read_text())
    found["people"] = people(results) or found.get("people", {})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("out/label_noise/results"))
    args = parser.parse_args()
    file = HERE / "results.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    found = collect(args.results, known)
    own = {name: value for name, value in found.items() if name not in KEPT}
    write_text(file, json.dumps(own, indent=1) + "\n")
    readme = HERE / "README.md"
    write_text(readme, fill(readme.read_text(), found))
    draw(found, HERE / "label_noise.png")


if __name__ == "__main__":
    main()
