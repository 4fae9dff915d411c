"""``hetsngp audit``."""

# No `from __future__ import annotations`: typer reads the annotations, which name a local import.
from pathlib import Path
from typing import Annotated, Any


def add(app: Any) -> None:
    """Add the command to the application."""
    import typer

    @app.command(
        epilog="Example: hetsngp audit photos --out audit, then hetsngp audit photos --apply choices.csv "
        "--out audit"
    )
    def audit(
        source: Annotated[
            str,
            typer.Argument(
                metavar="DATA_OR_RECIPE",
                help="A folder with one folder for each class, a .npz file, a data set (hetsngp data), a "
                "recipe: a .toml file or a name (hetsngp recipes), or the folder of a finished run.",
            ),
        ],
        out: Annotated[
            Path | None, typer.Option(help="Folder of the audit; default: audits/NAME.", file_okay=False)
        ] = None,
        apply: Annotated[
            Path | None,
            typer.Option(
                metavar="CSV",
                help="Apply the choices that were downloaded from the page of the audit in --out, and stop.",
                exists=True,
                dir_okay=False,
            ),
        ] = None,
        recipe: Annotated[
            bool, typer.Option("--recipe", help="Audit by the recipe, where data have the same name.")
        ] = False,
        change: Annotated[
            list[str] | None,
            typer.Option(
                "--set", metavar="KEY=VALUE", help="Change a key of the recipe, as of train. May be repeated."
            ),
        ] = None,
        rounds: Annotated[
            int,
            typer.Option(min=1, help="Largest number of rounds of correction; 1: only find wrong labels."),
        ] = 3,
        folds: Annotated[
            int | None,
            typer.Option(
                min=2, help="Number of folds; default: leave-one-out on frozen features, 5 for a recipe."
            ),
        ] = None,
        seed: Annotated[int, typer.Option(min=0, help="Seed of everything random but the recipe's.")] = 0,
        network: Annotated[
            str | None,
            typer.Option(
                metavar="NAME",
                help="Frozen network, efficientnet-lite2 or a name of timm's; default: "
                "efficientnet-lite0, else resnet18.",
            ),
        ] = None,
        weights: Annotated[
            Path | None,
            typer.Option(
                metavar="FILE",
                help="Weights of the frozen network, a .safetensors file.",
                exists=True,
                dir_okay=False,
            ),
        ] = None,
        size: Annotated[
            int | None,
            typer.Option(min=1, help="Side in pixels of the frozen network's input; default: its own."),
        ] = None,
        batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
        device: Annotated[
            str,
            typer.Option(help="Device of the frozen network: cpu, cuda, cuda:1, or auto (a GPU if any)."),
        ] = "auto",
        most: Annotated[int, typer.Option(min=1, help="Most examples on the page.")] = 5000,
        no_page: Annotated[bool, typer.Option("--no-page", help="Write no page.")] = False,
    ) -> None:
        """Find wrong labels of images, and show and correct them.

        Predicts each image by a model that was not trained on its label: on features of a frozen pretrained
        network, or by the network of a recipe or a run, which is trained once for each fold unless it is
        frozen. Writes label_errors.csv,
        suspicious.png, confusions.csv and .png, labels.safetensors for `hetsngp train RECIPE --set
        labels=OUT`, and review.html: a page on which a person decides. The data are never changed. Run the
        same command again to resume: docs/audit.md.
        """
        from hetsngp.auditing.run_audit import AuditSettings, AuditSource, apply_choices, report, run_audit

        found = AuditSource.find(source, change or [], recipe=recipe)
        folder = out or found.folder
        if apply is not None:
            print(apply_choices(found, folder, apply))
            return
        settings = AuditSettings(
            rounds, folds, seed, most, not no_page, network, weights, size, device, batch_size
        )
        content = run_audit(found, folder, settings, show=True)
        print(report(found, folder, content))
