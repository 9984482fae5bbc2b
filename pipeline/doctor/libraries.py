"""Finds out why a backend sees no GPU: NVIDIA's driver, and each CUDA library that it was built for, loaded for trial.

`python -m pipeline.doctor.libraries 12.5.1 9`: a process of its own, as what is loaded stays loaded.
"""

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path

DRIVER = "libcuda.so.1"
# Numbers of shared libraries by CUDA's, beside which they count on (its release notes, "CUDA component versions").
OF_CUDA = {
    "12": {"cudart": 12, "cublasLt": 12, "cublas": 12, "cufft": 11, "nvJitLink": 12, "cusparse": 12, "cusolver": 11},
    "13": {"cudart": 13, "cublasLt": 13, "cublas": 13, "cufft": 12, "nvJitLink": 13, "cusparse": 12, "cusolver": 12},
}
NCCL = "libnccl.so.2"


def needed(cuda: str, cudnn: str) -> list[str]:
    """The libraries of a build for CUDA and cuDNN of these versions, those that others need first.

    >>> needed("12.5.1", "9")[-3:]
    ['libcusolver.so.11', 'libcudnn.so.9', 'libnccl.so.2']
    """
    numbers = OF_CUDA.get(cuda.partition(".")[0], {})
    libraries = [f"lib{name}.so.{number}" for name, number in numbers.items()]
    return [*libraries, f"libcudnn.so.{cudnn.partition('.')[0]}", NCCL]


def missing(libraries: Sequence[str], search: Sequence[str]) -> dict[str, str]:
    """Those that cannot be loaded, each with why. Python's packages of NVIDIA's come before the system's folders."""
    errors: dict[str, str] = {}
    for library in libraries:
        installed = [path for folder in search for path in sorted(Path(folder).glob(f"nvidia/*/lib/{library}"))]
        try:
            # Others look for their functions among those that were loaded before.
            ctypes.CDLL(str(installed[0] if installed else library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            errors[library] = str(error)
    return errors


def driver() -> tuple[str | None, str | None]:
    """(The version of CUDA that the driver can do, why it cannot be used); one of them is None."""
    try:
        cuda = ctypes.CDLL(DRIVER)
        if code := cuda.cuInit(0):
            return None, f"cuInit of {DRIVER} fails with CUDA's error {code}"
        number = ctypes.c_int()
        cuda.cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError) as error:
        return None, str(error)
    return f"{number.value // 1000}.{number.value % 1000 // 10}", None


def main(cuda: str, cudnn: str) -> None:
    """Prints both, as JSON; with CUDA's version empty, of the driver alone."""
    version, error = driver()
    absent = missing(needed(cuda, cudnn), sys.path) if cuda else {}
    print(json.dumps({"driver": version, "driver_error": error, "missing": absent}))


if __name__ == "__main__":
    main(*sys.argv[1:3])
