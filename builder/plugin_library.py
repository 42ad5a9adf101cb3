"""Where the plugin library of TensorRT, `libkvsift_trt.so`, lies on this machine."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

from kvsift.builder.errors import EngineError
from kvsift.builder.ops import OPS_VERSION

#: The file's name, which ends in the version of the op set and of every plugin in it.
NAME = f"libkvsift_trt.so.{OPS_VERSION}"

#: Environment variable that names the library, or its directory, instead of the places below.
VARIABLE = "KVSIFT_PLUGIN_LIBRARY"

_BUILD = """\
build it (docs/tensorrt.md: nvcc and TensorRT's headers are needed) with \
pip install . -C cmake.define.KVSIFT_CUDA=ON in the source tree, or name it with """


def candidates() -> list[Path]:
    """Return the places that are searched, the first found counts.

    With the environment variable only what it names; else the installed package, then the
    documented build directory of the source tree.
    """
    named = os.environ.get(VARIABLE)
    if named:
        path = Path(named).expanduser()
        return [path / NAME if path.is_dir() else path]
    # builder/ is a part of the package when installed, and lies beside it in the source tree.
    here = Path(__file__).resolve().parent
    places = [here.parent / "lib"]
    try:  # an editable install keeps what was compiled beside the other packages
        installed = metadata.distribution("kvsift").locate_file("kvsift/lib")
        places.append(Path(str(installed)))
    except metadata.PackageNotFoundError:
        pass
    places.append(here.parent / "build/plugins-cuda/plugins")
    return [place / NAME for place in places]


def find() -> Path:
    """Return the plugin library that TensorRT loads; an absolute path.

    Raises EngineError where there is none: it names the places and how to build the library.
    """
    places = candidates()
    for place in places:
        if place.is_file():
            return place.resolve()
    searched = ", ".join(str(place) for place in dict.fromkeys(places))
    raise EngineError(f"no plugin library {NAME}; looked for {searched}; {_BUILD}{VARIABLE}=FILE")
