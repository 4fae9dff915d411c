"""Data sets by name: where their files are expected, and their readers.

``registry`` lists and opens them; ``dataset`` describes one and says where to get what is missing. Readers:
``cifar``, ``cifar_c``, ``human_labels`` (CIFAR-10N and -10H), ``svhn``, ``places`` (Places365 and scenes),
``imagenet`` (with -A, -C, -R and -V2), ``imagenet21k``, ``clinc150`` (texts). ``synsets`` has the class lists
of ImageNet, ``synthetic`` the paper's tasks in two dimensions.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetsngp.data.datasets.registry import describe, open_data

__all__ = ["describe", "open_data"]


def __getattr__(name: str) -> Any:
    """Import the registry when it is used: the modules that it imports use others of this package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hetsngp.data.datasets import registry

    return getattr(registry, name)
