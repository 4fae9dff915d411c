"""Make a torchvision whose compiled operators do not load importable in this environment.

Some package indices offer torchvision only as a CUDA build. Beside a CPU build of torch its extension does
not load, and `import torchvision` stops with "operator torchvision::nms does not exist": torchvision
registers meta kernels for `nms` and `qnms`, whose schemas only the extension declares. Declaring the two
schemas first is enough for models, transforms and timm (the operators themselves stay unavailable).

`make setup` runs this file with the environment's interpreter. Where `import torchvision` works, or
torchvision is absent, nothing is left behind; where it fails for this reason, a lazy import hook is written
into site-packages. The hook acts when torchvision is first imported and imports nothing before that.
"""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

SYMPTOM = "torchvision::nms does not exist"

HOOK = '''\
"""Declare torchvision's operator schemas just before its import; see tools/torchvision_hook.py."""

import sys

_library = None  # a torch.library.Library withdraws its schemas when it is collected


def _declare():
    global _library
    if _library is None:
        import torch

        _library = torch.library.Library("torchvision", "FRAGMENT")
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _TorchvisionFinder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "torchvision":
            return None
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):  # on execution, not on lookup: asking "is it installed?" stays free
            _declare()
            execute(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _TorchvisionFinder)
'''


def import_error() -> str:
    """Return what `import torchvision` prints on stderr in a fresh interpreter, "" where it works."""
    run = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    return "" if run.returncode == 0 else run.stderr


def main() -> int:
    if sys.prefix == sys.base_prefix:
        print("torchvision hook: run me with the interpreter of a virtual environment", file=sys.stderr)
        return 1
    site_packages = Path(sysconfig.get_paths()["purelib"])
    module = site_packages / "_torchvision_schemas.py"
    pth = site_packages / "_torchvision_schemas.pth"
    pth.unlink(missing_ok=True)  # judge torchvision as it is now, not as an earlier hook left it
    module.unlink(missing_ok=True)

    if importlib.util.find_spec("torchvision") is None:
        return 0
    error = import_error()
    if SYMPTOM in error:
        module.write_text(HOOK)
        pth.write_text("import _torchvision_schemas\n")
        error = import_error()
        if not error:
            print("torchvision hook: installed (this torchvision's operators do not load beside this torch)")
    if error:
        pth.unlink(missing_ok=True)
        module.unlink(missing_ok=True)
        print(f"torchvision hook: `import torchvision` fails and no hook helps:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
