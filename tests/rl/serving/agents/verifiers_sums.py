"""A taskset of verifiers with a tool and two rewards."""
# pyright: reportMissingImports=false, reportUntypedBaseClass=false
# ruff: noqa: D103

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Calculator(vf.ToolsetConfig(colocated=True))]

    @vf.reward
    async def right(self, task: SumData, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == task.answer)

    @vf.reward(weight=0.5)
    async def said(self, trace: vf.Trace) -> float:
        return float(bool(trace.last_reply))


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Iterator[SumTask]:
        for n in range(10):
            yield SumTask(SumData(prompt=f"What is 2+{n}?", answer=str(2 + n)), self.config.task)


def sums() -> Sums:
    return Sums(vf.TasksetConfig(id="sums"))


if __name__ == "__main__":
    Calculator.run()
