"""All kernels that pagec ships for NVIDIA GPUs: those of every tuned choice, in the sizes that its table was
made for, of the defaults in the same sizes and in the models of configs/models, and of every template.

What two GPUs have in common stands here once, by architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pagec import configs
from pagec.autotune.compiled import attention_shape
from pagec.autotune.database import Database
from pagec.autotune.problem import Decode, Linear, Problem, problem_from
from pagec.autotune.space import SPACES
from pagec.autotune.table import MODES, Mode
from pagec.compiler.backends.cuda.attention import decode, prefill
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.knobs import Chooser
from pagec.compiler.backends.cuda.linear import LinearShape, linear, plain
from pagec.compiler.backends.targets import GPUS, load_cuda_target
from pagec.compiler.driver import CompileOptions, plan_gpu_model
from pagec.compiler.spec import parse_spec
from pagec.compiler.target import CudaTarget
from support.cuda import cuda_kernels

# One GPU of each architecture.
CHIPS: Final = ("a100", "h100")


@dataclass(frozen=True, slots=True)
class Shipped:
    """A kernel, and a GPU that it is for."""

    kernel: CudaKernel
    target: CudaTarget

    @property
    def name(self) -> str:
        """By which it is on record."""
        return f"sm_{self.target.sm}/{self.kernel.key}"


def all_shipped() -> dict[str, Shipped]:
    """Every shipped kernel by name, sorted."""
    found = {one.name: one for one in (*_tuned(), *_of_models(), *of_templates())}
    return dict(sorted(found.items()))


def of_templates() -> Iterator[Shipped]:
    """Kernels of every template, for every architecture."""
    for chip in CHIPS:
        yield from (Shipped(kernel, load_cuda_target(chip)) for kernel in cuda_kernels())


def _tuned() -> Iterator[Shipped]:
    """Of all tables, and the defaults in the same sizes."""
    for name in GPUS:
        target, database = load_cuda_target(name), Database(name, "cuda")
        for mode in MODES:
            strict = mode == "strict"
            tuned = Chooser(target, database.choices(SPACES, mode), strict=strict)
            for problem in _weighed(database, mode):
                for chooser in (tuned, Chooser(target, {}, strict=strict)):
                    yield from (Shipped(kernel, target) for kernel in _chosen(problem, chooser))
        assert not database.notices, database.notices


def _weighed(database: Database, mode: Mode) -> Iterator[Problem]:
    """What each choice was weighed at."""
    for kind in SPACES:
        for key in database.keys(kind):
            entry = database.find(kind, key)
            assert entry is not None
            yield from (problem_from(kind, choice.facts["weighed_at"]) for choice in entry.sets[mode])


def _chosen(problem: Problem, chooser: Chooser) -> tuple[CudaKernel, ...]:
    """The kernels that a program takes for a problem."""
    if isinstance(problem, Linear):
        shape = LinearShape(problem.N, problem.K, "bf16")
        return linear(shape, plain(shape, "bf16"), chooser.linear(shape, problem.M)[0])
    attention = attention_shape(problem)
    if size := chooser.block_size(attention):
        attention = attention_shape(problem, size)
    if isinstance(problem, Decode):
        return (decode(attention, chooser.decode(attention, problem.sequences)[0]),)
    return (prefill(attention, chooser.prefill(attention)[0]),)


def _of_models() -> Iterator[Shipped]:
    """Of a layer of each model, where nothing is tuned."""
    for path in sorted((configs.root() / "models").glob("*.yaml")):
        spec = parse_spec(f"extends: {path.stem}\nparams: {{layers: 1}}\n", path.name)
        for chip in CHIPS:
            target = load_cuda_target(chip)
            for mode in MODES:
                options = CompileOptions(path.stem, target=chip, strict=mode == "strict")
                plan = plan_gpu_model(spec, options, target)
                yield from (Shipped(kernel, target) for kernel in plan.kernels.values())
