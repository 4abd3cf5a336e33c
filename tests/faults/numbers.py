"""Gradients of a rank that are not finite, or huge, in steps that are drawn at random; and a loss scale that falls."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.faults.mishaps import HUGE
from tests.faults.table import Fault
from tests.faults.world import EVERY, STEPS, Ended, Planted, World

GROUP = "numbers"
_WITHIN = 60
_SCALED_STEPS = 60
_LOST_STEPS = 400
"""More than halve a loss scale to nothing."""


def _at_random(transport: str) -> int:
    return random.Random(f"a step over {transport}").randint(EVERY + 1, STEPS - 1)


def _of_a_checkpoint(transport: str) -> int:
    return 2 * EVERY


def _spoilt(kind: str, name: str, rank: int, step_of: Callable[[str], int], short: bool = False) -> Fault:
    """A gradient that is spoilt in a step, which depends on the transport."""

    def run(world: World) -> str:
        step = step_of(world.transport)
        ended = world.train(planted=Planted(kind, "step", rank, step)).failed()
        ended.expect("the loss is no longer a finite number")
        summary = world.summary
        assert (summary["status"], summary["identical"]) == ("diverged", True), summary
        world.weights()
        before = (step - 1) // EVERY * EVERY
        assert world.saved[-1] == before, f"spoilt in step {step}, and there are checkpoints after steps {world.saved}"
        world.forget(before)
        return f"spoilt in step {step}, ended after step {summary['steps']}; {world.goes_on(before)}"

    return Fault(
        name,
        GROUP,
        "All ranks end with code 1, and no checkpoint contains weights that are not finite. After a restart, training "
        "continues from the newest checkpoint.",
        _WITHIN,
        run,
        short=short,
    )


def _huge(world: World) -> str:
    step = 6
    ended = world.train(planted=Planted("huge", "step", 1, step)).failed()
    ended.expect("the loss is no longer a finite number")
    summary = world.summary
    assert (summary["status"], summary["identical"]) == ("diverged", True), summary
    world.weights()
    assert step <= summary["steps"] <= STEPS, summary["steps"]
    return f"ended after step {summary['steps']}, with the same weights on both ranks"


def _scaled(world: World, steps: int, *options: str, faulty: bool = True) -> Ended:
    """A training with a loss scaler."""
    words = ["-m", "tests.faults.scaled_victim", "--folder", str(world.folder), "--steps", str(steps), *options]
    return world.run([*words, "--ddp" if world.transport == "ddp" else "--horovod"], faulty)


def _skips(world: World, kind: str, bad: list[int]) -> str:
    """Steps of which rank 1's gradient is spoilt leave no trace: the weights are those of a training without them."""
    spoilt = ",".join(map(str, bad))
    ended = _scaled(world, _SCALED_STEPS, "--rank", "1", "--kind", kind, "--bad", spoilt)
    assert ended.code == 0, ended.output[-3000:]
    without = World(world.transport, world.folder / "without", world.within)
    without.folder.mkdir()
    ended = _scaled(without, _SCALED_STEPS, "--left-out", spoilt, faulty=False)
    assert ended.code == 0, ended.output[-3000:]
    found, expected = world.weights(), without.weights()
    assert sorted(found) == list(range(1, _SCALED_STEPS + 1)), sorted(found)
    apart = [step for step in found if found[step] != expected[step]]
    assert not apart, f"the weights after step {apart[0]} are not those of a training without the spoilt steps"
    return f"both ranks skipped {len(bad)} of {_SCALED_STEPS} steps; the weights are those of a training without them"


def _skips_at_random(kind: str) -> Fault:
    def run(world: World) -> str:
        draws = random.Random(f"scaled {kind} {world.transport}")
        return _skips(world, kind, sorted(draws.sample(range(2, _SCALED_STEPS), 8)))

    return Fault(
        f"{kind} in a gradient of rank 1 in eight random steps, with a loss scaler",
        GROUP,
        "The loss scaler skips these steps on every rank, and the residuals do not change.",
        _WITHIN,
        run,
    )


def _falls(world: World) -> str:
    return _skips(world, "inf", list(range(5, 45)))


def _lost(world: World) -> str:
    ended = _scaled(world, _LOST_STEPS, "--rank", "1", "--kind", "nan", "--bad", "5-").failed()
    made = world.weights()
    assert len(made) < _LOST_STEPS, "all steps were made"
    assert ended.output.count("the loss scale has fallen to") >= 2, f"not both ranks say so: {ended.output[-3000:]}"
    return "both ranks ended with the reason, in the same step and with the same weights"


FAULTS = [
    _spoilt("nan", "NaN in a gradient of rank 1, at a random step", 1, _at_random, short=True),
    _spoilt("inf", "inf in a gradient of rank 0, at a random step", 0, _at_random),
    _spoilt("nan", "NaN in a gradient of rank 1, in the step of a checkpoint", 1, _of_a_checkpoint),
    Fault(
        f"a gradient of {HUGE:g} on rank 1",
        GROUP,
        "All ranks end with code 1 as soon as the loss is not finite.",
        _WITHIN,
        _huge,
        ("gloo", "ddp"),
    ),
    _skips_at_random("nan"),
    _skips_at_random("inf"),
    Fault(
        "inf on rank 1 in forty consecutive steps, with a loss scaler",
        GROUP,
        "The loss scale is halved in each of these steps, and no residual is lost. Training continues as if these "
        "steps had not happened.",
        _WITHIN,
        _falls,
        ("gloo", "ddp"),
    ),
    Fault(
        "NaN on rank 1 in all steps, with a loss scaler",
        GROUP,
        "All ranks end with an error in the same step, when the loss scale has fallen to zero.",
        _WITHIN,
        _lost,
    ),
]
