"""`hvdcomp doctor` and cards for InfiniBand: as the kernel lists them, and as a library finds them, which NCCL asks."""

from __future__ import annotations

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from hvdcomp.tools.commands import doctor
from hvdcomp.tools.doctor.checks import find_problems
from hvdcomp.tools.doctor.facts import Facts, InfiniBand
from hvdcomp.tools.doctor.gather import find_infiniband
from tests.tools.doctor.test_doctor import HEALTHY, ON_V100, V100, changed

CARD = InfiniBand(("mlx5_0",), usable=1)


def _card(folder: Path, name: str, state: str) -> None:
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")


@pytest.mark.parametrize(
    ("found", "what", "remedy"),
    [
        (InfiniBand(("mlx5_0", "mlx5_1"), error="cannot open"), "(mlx5_0, mlx5_1), but libibverbs can", "libibverbs1"),
        (InfiniBand(("mlx5_0",)), "libibverbs finds no card that this process may use", "/dev/infiniband"),
        (InfiniBand(("mlx5_0",), usable=1, locked_memory=65536), "lock only 64 KiB of memory", "ulimit -l unlimited"),
    ],
)
def test_what_keeps_nccl_from_a_card_is_named_with_its_remedy(found: InfiniBand, what: str, remedy: str) -> None:
    (problem,) = find_problems(changed(**ON_V100, infiniband=found))
    assert what in problem.what
    assert remedy in problem.remedy
    assert not problem.stops


@pytest.mark.parametrize(
    "facts",
    [
        changed(**ON_V100, infiniband=CARD),
        changed(**ON_V100, infiniband=InfiniBand(("mlx5_0",), usable=1, locked_memory=2**36)),
        changed(infiniband=InfiniBand(("mlx5_0",))),  # no GPU
        changed(**ON_V100, infiniband=InfiniBand(("mlx5_0",)), variables={**HEALTHY.variables, "NCCL_IB_DISABLE": "1"}),
        changed(**ON_V100, infiniband=InfiniBand(("mlx5_0",)), variables={**HEALTHY.variables, "NCCL_NET": "Socket"}),
    ],
)
def test_nothing_is_said_where_nothing_is_wrong_or_infiniband_is_not_wanted(facts: Facts) -> None:
    assert find_problems(facts) == []


def test_only_cards_with_a_port_that_is_up_are_found(tmp_path: Path) -> None:
    assert find_infiniband(tmp_path / "nowhere") is None
    _card(tmp_path, "mlx5_0", "1: DOWN")
    assert find_infiniband(tmp_path) is None
    _card(tmp_path, "mlx5_1", "4: ACTIVE")
    found = find_infiniband(tmp_path)
    assert found is not None
    assert found.cards == ("mlx5_1",)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_library_is_asked_and_the_limit_of_locked_memory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "void **ibv_get_device_list(int *count) { *count = 2; return 0; }"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "libibverbs.so.1")]
    subprocess.run(command, input=source, text=True, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    _card(tmp_path / "devices", "mlx5_0", "4: ACTIVE")
    found = find_infiniband(tmp_path / "devices")
    assert found is not None
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    assert found == InfiniBand(("mlx5_0",), 2, None if limit == resource.RLIM_INFINITY else limit)
    rows = dict(doctor.describe(changed(gpus=(V100,), infiniband=found)))
    assert rows["InfiniBand, RoCE"].startswith("mlx5_0; libibverbs finds 2; locked memory ")
