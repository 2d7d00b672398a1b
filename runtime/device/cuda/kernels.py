"""An artifact's kernels, loaded into the GPU: all at once, so that nothing is loaded while serving."""

from __future__ import annotations

from ctypes import c_void_p
from dataclasses import dataclass

from pagec.compiler.artifact import KERNELS, GpuArtifact
from pagec.compiler.errors import ArtifactError
from pagec.compiler.launch import LaunchMetadata
from pagec.runtime.device.cuda.driver import Driver


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel that can be launched: its key, its function in the GPU, and how it wants to be launched."""

    key: str
    function: c_void_p
    launch: LaunchMetadata


def load_kernels(
    artifact: GpuArtifact, driver: Driver, capability: tuple[int, int], gpu_name: str
) -> tuple[dict[str, LoadedKernel], list[str]]:
    """The kernels by key, and what a user should be told of them.

    Machine code runs on GPUs of the same major capability and no lower minor one; PTX on all later ones.
    """
    sm, target = 10 * capability[0] + capability[1], artifact.target
    if target.sm // 10 == capability[0] and sm >= target.sm:
        return _load(artifact, driver, "cubin"), []
    portable = all((artifact.path / KERNELS / f"{key}.ptx").is_file() for key in artifact.kernels)
    if sm < target.sm or not portable:
        raise ArtifactError(
            f"made for {target.name} (sm_{target.sm}), this GPU is a {gpu_name} (sm_{sm})",
            place=str(artifact.path),
            remedy="compile the model again for this GPU (--target)",
        )
    notice = (
        f"{artifact.path}: made for {target.name} (sm_{target.sm}); the driver has compiled its kernels for "
        f"this {gpu_name} (sm_{sm}), which a compilation for it (--target) would do better"
    )
    return _load(artifact, driver, "ptx"), [notice]


def _load(artifact: GpuArtifact, driver: Driver, kind: str) -> dict[str, LoadedKernel]:
    found = {}
    for key, compiled in artifact.kernels.items():
        file, launch = artifact.path / KERNELS / f"{key}.{kind}", compiled.launch
        try:
            image = file.read_bytes()
        except OSError as error:
            raise ArtifactError(
                f"kernel cannot be read: {error.strerror}", place=str(file), remedy="compile the model again"
            ) from error
        module = driver.load(key, image)  # stays loaded as long as the process runs
        function = driver.function(key, module, launch.symbol, launch.shared_bytes)
        found[key] = LoadedKernel(key, function, launch)
    return found
