"""A CPU's kernels, one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from pagec.compiler.program import HEAD_COUNTS, Launch
from pagec.runtime.cli.verification.inputs import Step
from pagec.runtime.cli.verification.model import Verification
from pagec.runtime.cli.verification.step import NodeLaunches, StepCheck
from pagec.runtime.runner import Runner


class CpuVerification(Verification):
    """Of an artifact for a CPU."""

    def check(self, step: Step) -> StepCheck:
        return CpuStepCheck(self, step)


class CpuStepCheck(StepCheck):
    """A step's launches by their variants."""

    def launches(self) -> Iterator[NodeLaunches]:
        runner = self.v.runner
        assert isinstance(runner, Runner)
        runner.upload(self.batch)
        runner.upload_logit_rows(self.batch.logit_rows)
        runner.upload_sampling(self.sampling)
        for group in self._groups(runner, {node.outputs[0] for node in self.fused.nodes}):
            count = self._count(group[0])
            if group[0].key_for(count):
                yield NodeLaunches(
                    group[0].name,
                    tuple((launch.key_for(count), count) for launch in group),
                    tuple(arg for launch in group for arg in launch.args),
                    partial(self._run, runner, group, count),
                )

    def _run(self, runner: Runner, group: list[Launch], count: int) -> None:
        for launch in group:
            runner.launch(launch.name, count)

    def _count(self, launch: Launch) -> int:
        if launch.rows in HEAD_COUNTS:
            return len(self.batch.logit_rows)
        return self.batch.num_tokens if launch.rows == "T" else len(self.batch.tiles)

    def _groups(self, runner: Runner, nodes: Collection[str]) -> list[list[Launch]]:
        """The launches of each node: one, and what else belongs to it."""
        found: list[list[Launch]] = []
        for launch in (*runner.program.body, *runner.program.head):
            if launch.name in nodes:
                found.append([launch])
            else:
                found[-1].append(launch)
        return found
