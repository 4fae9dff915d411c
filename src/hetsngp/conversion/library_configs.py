"""Checks of a library's config from a saved model, before the library sees it.

timm and transformers take names of repositories, files, weights and code in many places of their configs.
What would fetch any of them is refused, and while a network is constructed no connection can be made.
"""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hetsngp.limits import CONFIG_NUMBER, CONFIG_POSITIONS

# Arguments of timm.create_model that describe a network: no other is written by hetsngp.save.
_TIMM_KEYS = {"model_name", "num_classes", "global_pool", "drop_rate", "in_chans", "img_size"}
_TORCHVISION_KEYS = {"name", "num_classes"}
_TRANSFORMERS_KEYS = {"class", "config", "pooling"}
# A name of timm's own list: other sources have a scheme or a path ("hf-hub:…", "local-dir:…").
_TIMM_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)?")
# Where the network came from: transformers does not need it to construct one.
_IGNORED = ("_name_or_path", "name_or_path", "_commit_hash")
# Keys of transformers' configs that name weights, code or files, at any depth.
_SOURCES = re.compile(
    r"backbone|use_timm_backbone|.*pretrained.*|checkpoint(_path|_file)?|cache_dir|local_dir|repo_id|gguf_file"
    r"|hf_hub_id|hf_hub_filename|url|file|state_dict|auto_map|custom_code|custom_pipelines|trust_remote_code"
    r"|code_revision|quantization_config|compression_config|use_kernels|kernel_config|allow_all_kernels"
    r"|peft_config"
)
_IMPLEMENTATION = re.compile(r".*(attn|attention|experts)_implementation.*")
_BUILT_IN = ("eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
_CONNECTIONS = {"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"} | {
    f"socket.{name}" for name in ("gethostbyname", "gethostbyaddr", "getnameinfo")
}


class DownloadRefused(ValueError):
    """A config names something that would be fetched, and the caller did not ask for that."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: if you trust the model, hetsngp.load(path, allow_download=True) allows it")


# --- names of weights and code --------------------------------------------------------------------------


def check_sources(library: str, config: Any) -> None:
    """Raise :class:`DownloadRefused` where the config names weights, code or files."""
    if library == "transformers":
        _check_keys(config, _TRANSFORMERS_KEYS)
        for values in _dicts(config["config"]):
            for key, value in values.items():
                _check_entry(values, key, value)
        return
    _check_keys(config, _TIMM_KEYS if library == "timm" else _TORCHVISION_KEYS)
    name = config.get("model_name" if library == "timm" else "name")
    if not isinstance(name, str) or not _TIMM_NAME.fullmatch(name):
        raise DownloadRefused(f"{name!r:.100} is not the name of a network of {library}")


def without_origin(config: Any) -> Any:
    """Config without the names of where it came from, at any depth."""
    if isinstance(config, dict):
        return {key: without_origin(value) for key, value in config.items() if key not in _IGNORED}
    return [without_origin(value) for value in config] if isinstance(config, list) else config


def _check_keys(config: Any, known: set[str]) -> None:
    if not isinstance(config, dict):
        raise TypeError(f"the config of its network is {config!r:.50}")
    for key in config:
        if key not in known:
            raise DownloadRefused(f"the config of its network has {key!r:.50}, which hetsngp does not write")


def _check_entry(values: dict[str, Any], key: str, value: Any) -> None:
    if not value:  # None, False and empty containers name nothing
        return
    if _IMPLEMENTATION.fullmatch(key):
        for name in value.values() if isinstance(value, dict) else [value]:
            if name not in (None, True, *_BUILT_IN):
                raise DownloadRefused(f"{key} is {name!r:.50}, which may be fetched")
    elif key == "architecture" or (key == "backbone" and values.get("model_type") == "timm_backbone"):
        if not isinstance(value, str) or not _TIMM_NAME.fullmatch(value):
            raise DownloadRefused(f"{key} is {value!r:.50}, which is not the name of a network of timm")
    elif _SOURCES.fullmatch(key):
        raise DownloadRefused(f"{key} is {value!r:.50}, which names weights, code or a file")


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    """Dicts in nested containers, from the outside."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from _dicts(part)


# --- numbers ----------------------------------------------------------------------------------------------


def check_numbers(library: str, config: Any, largest: int) -> None:
    """Check that whole numbers are not far above ``largest``, the largest size among the saved tensors.

    Constructors loop over some of them before any tensor is made.
    """
    kind = None
    for values in _dicts(config):
        kind = values.get("model_type", kind)  # that of an outer dict, for settings of rotations in one
        for key, value in values.items():
            most = max(CONFIG_NUMBER.value, largest)
            if library == "transformers" and "position" in key and _is_rotary(kind):
                most = max(CONFIG_POSITIONS.value, most)
            # Bases of rotations are real numbers, which some configs write without a point.
            number = 0 if "theta" in key else max(map(abs, _integers(value)), default=0)
            if number > most:
                limit = CONFIG_POSITIONS if most == CONFIG_POSITIONS.value else CONFIG_NUMBER
                raise ValueError(
                    f"{key} is {number!s:.30}, far more than the saved weights have: if you trust this "
                    f"model, set the environment variable {limit.variable} to allow it"
                )


def _integers(value: Any) -> Iterator[int]:
    """Whole numbers in nested lists."""
    if isinstance(value, int):
        yield value
    for part in value if isinstance(value, list) else ():
        yield from _integers(part)


def _is_rotary(model_type: Any) -> bool:
    """Whether transformers' config class of that name has settings of rotary positions."""
    try:
        import transformers

        kind = transformers.CONFIG_MAPPING[model_type]
        return any(name.startswith("rope") for name in inspect.signature(kind).parameters)
    except (ImportError, KeyError, TypeError, ValueError):
        return False


# --- connections ------------------------------------------------------------------------------------------


class _Offline(threading.local):
    active = False


_offline = _Offline()
_install = threading.Lock()
_installed = False


def _refuse_connection(event: str, args: tuple[Any, ...]) -> None:
    if _offline.active and event in _CONNECTIONS:
        raise DownloadRefused("the config of its network needs a connection to another machine")


@contextmanager
def offline() -> Iterator[None]:
    """Context in which this thread makes no connection, whatever the library's code tries."""
    global _installed
    with _install:
        if not _installed:  # a hook of the interpreter cannot be removed; it costs 0.4 µs an event
            sys.addaudithook(_refuse_connection)
            _installed = True
    before, _offline.active = _offline.active, True
    try:
        yield
    finally:
        _offline.active = before
