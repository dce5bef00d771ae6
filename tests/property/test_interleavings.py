"""Random steps with offloading and without: gradients of equal bits, no hazard, nothing left."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.property.programs import Offloaded, Plain, Run, Settings, Step, same_bits
from tests.property.strategies import engines, models, steps_of

SOON = settings(deadline=None, max_examples=300, derandomize=True, suppress_health_check=list(HealthCheck))
LATER = settings(deadline=None, max_examples=5000, suppress_health_check=list(HealthCheck))


def check(stages: tuple, trains_input: bool, steps: list[Step], engine: Settings) -> None:
    plain = Run(stages, Plain(), trains_input)
    said = Offloaded(engine, len(stages))
    try:
        run = Run(stages, said, trains_input)
        for step in steps:
            plain.step(step)
            run.step(step)
            assert len(plain.results) == len(run.results)
            assert all(same_bits(*pair) for pair in zip(plain.results, run.results, strict=True))
    except BaseException:
        with pytest.MonkeyPatch.context() as patch:
            from offload import PipelineOffloadManager
            patch.setattr(PipelineOffloadManager, "OFFLOAD_MGR", None)
        PipelineOffloadManager.OFFLOAD_MGR = None
        raise
    said.close()


@given(st.data())
@SOON
def test_any_interleaving(data: st.DataObject) -> None:
    stages = data.draw(models())
    check(stages, data.draw(st.booleans()), data.draw(steps_of(len(stages))), data.draw(engines()))
