"""``hetsngp evaluate``."""

# No postponed annotations: typer reads them where the command is made, in a scope that has imported it.
from pathlib import Path
from typing import Annotated, Any


def add(app: Any) -> None:
    """Enter the command."""
    import typer

    @app.command(
        epilog="Example: hetsngp evaluate runs/cifar100 --ood near=cifar10 --ood far=scenes "
        "--corrupted cifar100-c"
    )
    def evaluate(
        run: Annotated[Path, typer.Argument(help="Folder of a run that `hetsngp train` has finished.")],
        ood: Annotated[
            list[str] | None,
            typer.Option(
                metavar="NAME=SET",
                help="A set unlike the training data: what to call it = its name (hetsngp data) or folder.",
            ),
        ] = None,
        corrupted: Annotated[
            str | None,
            typer.Option(
                metavar="SET",
                help="cifar10-c, cifar100-c, imagenet-c, or made: of the test images, by our code.",
            ),
        ] = None,
        data: Annotated[
            str | None,
            typer.Option(
                metavar="SET", help="Labelled images in place of the test images of the training's own set."
            ),
        ] = None,
        out: Annotated[
            Path | None, typer.Option(help="Folder for the report; default: RUN/evaluation.", file_okay=False)
        ] = None,
        limit: Annotated[
            int | None, typer.Option(min=1, help="So many images of each set, for a quick look.")
        ] = None,
        batch_size: Annotated[int, typer.Option(min=1)] = 500,
        quick: Annotated[
            bool,
            typer.Option(
                "--quick", help="Corrupted sets without their doubts: several times faster with a GP."
            ),
        ] = False,
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto: a GPU if there is one.")] = "auto",
    ) -> None:
        """How accurate, how calibrated, and how well it knows what it does not know: a report with pictures.

        Writes report.md, report.json and pictures. What is finished is kept, so an interrupted evaluation
        goes on. docs/evaluation.md defines every number.
        """
        from hetsngp.evaluation.run_evaluation import RunSets, evaluate_run
        from hetsngp.serving.bundle import find_device

        sets = RunSets(data, _named(ood or []), corrupted, limit)
        folder = out or run / (
            "evaluation" if data is None else f"evaluation-{Path(data).name.replace(':', '-')}"
        )
        report = evaluate_run(
            run, sets, folder, batch_size=batch_size, quick=quick, device=find_device(device)
        )
        print(report)
        print(f"wrote {folder / 'report.md'} and its pictures, {folder / 'report.png'} among them")


def _named(texts: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, spec = text.partition("=")
        spec = (spec if equals else name).strip()
        name = name.strip()
        if not name or not spec:
            raise ValueError(f"--ood takes NAME=SET, e.g. near=cifar10, got {text!r}")
        if name in found:
            raise ValueError(f"--ood has the name {name!r} twice: call one of the sets something else")
        found[name] = spec
    return found
