"""``hetsngp evaluate``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
from pathlib import Path
from typing import Annotated, Any


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(
        epilog="Example: hetsngp evaluate runs/cifar100 --ood near=cifar10 --ood far=scenes "
        "--corrupted cifar100-c"
    )
    def evaluate(
        run: Annotated[
            Path, typer.Argument(metavar="RUN", help="Folder of a finished run of `hetsngp train`.")
        ],
        ood: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME=SET",
                help="Out-of-distribution images or texts: a name for the report, and a data set (hetsngp "
                "data), folder or file. May be repeated.",
            ),
        ] = None,
        corrupted: Annotated[
            str | None,
            typer.Option(
                metavar="SET",
                help="Corrupted test images: cifar10-c, cifar100-c, imagenet-c, or made (computed from the "
                "test images).",
            ),
        ] = None,
        data: Annotated[
            str | None,
            typer.Option(
                metavar="SET",
                help="Labelled images or texts to use instead of the test split of the training data.",
            ),
        ] = None,
        out: Annotated[
            Path | None, typer.Option(help="Folder for the report; default: RUN/evaluation.", file_okay=False)
        ] = None,
        limit: Annotated[
            int | None, typer.Option(min=1, help="Number of examples of each set, for a quick look.")
        ] = None,
        batch_size: Annotated[int, typer.Option(min=1, help="Examples per batch.")] = 500,
        quick: Annotated[
            bool,
            typer.Option(
                "--quick", help="No uncertainties of corrupted images: several times faster with a GP."
            ),
        ] = False,
        device: Annotated[
            str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU if there is one.")
        ] = "auto",
    ) -> None:
        """Measure accuracy, calibration and OOD detection of a run.

        Writes report.md, report.json and figures. Finished parts are kept: run the same command again to
        resume. docs/evaluation.md defines every number.
        """
        from hetsngp.evaluation.run_evaluation import RunSets, evaluate_run
        from hetsngp.serving.bundle import find_device

        sets = RunSets(data, _parse_ood(ood or []), corrupted, limit)
        folder = out or run / (
            "evaluation" if data is None else f"evaluation-{Path(data).name.replace(':', '-')}"
        )
        report = evaluate_run(
            run, sets, folder, batch_size=batch_size, quick=quick, device=find_device(device)
        )
        print(report)
        print(f"wrote {folder / 'report.md'} and figures such as {folder / 'report.png'}")


def _parse_ood(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, spec = text.partition("=")
        spec = (spec if equals else name).strip()
        name = name.strip()
        if not name or not spec:
            raise ValueError(f"--ood takes NAME=SET, e.g. near=cifar10, got {text!r}")
        if name in found:
            raise ValueError(f"--ood has the name {name!r} twice: give each set its own name")
        found[name] = spec
    return found
